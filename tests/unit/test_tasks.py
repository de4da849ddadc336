"""Tasks: what they ask, that held-out stays held out, what they pay for, and settings that they refuse."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import conf
from trainer.tasks import Example, Task
from trainer.tasks.arithmetic import ArithmeticTask, number_in_words
from trainer.tasks.jsonl import JsonlTask
from trainer.tasks.reasoning_gym import ReasoningGymTask
from trainer.tasks.tokenizer import load_tokenizer
from trainer.tasks.verifiers import VERIFIERS, resolve_verifier, verify

TASK_CLASSES = {
    "arithmetic": ArithmeticTask,
    "sums": ArithmeticTask,
    "reasoning_gym": ReasoningGymTask,
    "chain_sum": ReasoningGymTask,
    "jsonl": JsonlTask,
}
OVERRIDES = {"reasoning_gym": {"dataset": "spell_backward", "train_size": 300, "heldout_size": 50}}


def load(preset: str, **overrides) -> Task:
    """The task of ``conf/task/<preset>.yaml``, through the schema that its class is."""
    folder = Path(conf.__path__[0]) / "task"
    values = OmegaConf.load(folder / f"{preset}.yaml")
    if "defaults" in values:
        values = OmegaConf.merge(OmegaConf.load(folder / f"{values.pop('defaults')[0]}.yaml"), values)
    task_class = TASK_CLASSES[preset]
    assert values.pop("_target_") == f"{task_class.__module__}.{task_class.__name__}"
    assert set(values) == {field.name for field in dataclasses.fields(task_class)}
    schema = OmegaConf.structured(task_class, flags={"readonly": False})
    given = OmegaConf.create({**OVERRIDES.get(preset, {}), **overrides})
    merged = OmegaConf.merge(OmegaConf.create({"seed": 1}), {"task": OmegaConf.merge(schema, values, given)})
    return task_class(**OmegaConf.to_container(merged, resolve=True)["task"])


def jsonl_file(path: Path, rows: list) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def preset(request, tmp_path) -> Task:
    if request.param != "jsonl":
        return load(request.param)
    rows = [{"prompt": f"größer: {n} + {n} =", "answer": 2 * n, "source": "é"} for n in range(50)]
    return load("jsonl", path=jsonl_file(tmp_path / "sums.jsonl", rows), verifier="numeric")


every_preset = pytest.mark.parametrize("preset", TASK_CLASSES, indirect=True)


def random_text(seed: int) -> str:
    draw = random.Random(seed)
    return "".join(chr(draw.choice([draw.randrange(32, 127), draw.randrange(0x3000)])) for _ in range(seed % 40))


@every_preset
def test_examples_are_a_function_of_the_fields(preset):
    copy = pickle.loads(pickle.dumps(preset))
    assert copy == preset
    assert list(preset.train) == list(copy.train)
    assert list(preset.heldout) == list(copy.heldout)
    other = dataclasses.replace(preset, seed=2)
    assert [example.question for example in other.heldout] != [example.question for example in preset.heldout]


@every_preset
def test_pickle_leaves_derived_data_behind(preset):
    size = len(pickle.dumps(preset))
    assert len(preset.train) > 0
    assert len(pickle.dumps(preset)) == size


@every_preset
def test_heldout_questions_are_not_trained_on(preset):
    preset.validate()
    train = {example.question for example in preset.train}
    heldout = {example.question for example in preset.heldout}
    assert train
    assert heldout
    assert train.isdisjoint(heldout)
    assert heldout.isdisjoint(preset.corpus())


@every_preset
def test_own_answer_pays_one_and_junk_nothing(preset):
    draw = random.Random(0)
    for seed in range(500):
        example = draw.choice(preset.train[:100])
        assert preset.score(example.answer, example) == 1.0
        assert preset.score(f" {example.answer}\n", example) == 1.0
        text = random_text(seed)
        assert preset.score(text, example) == 0.0, (text, example)


@every_preset
def test_tokenizer_round_trip_of_all_texts(preset):
    tokenizer = load_tokenizer(None, task=preset, vocab_size=384)
    for example in (*preset.train, *preset.heldout):
        for text in (example.question, example.answer):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@every_preset
def test_train_is_a_sequence(preset):
    train = preset.train
    assert train[-1] == train[len(train) - 1]
    assert list(train[1:4]) == [train[1], train[2], train[3]]
    with pytest.raises(IndexError):
        train[len(train)]


def test_number_words():
    numbers = {
        0: "zero",
        7: "seven",
        12: "twelve",
        20: "twenty",
        21: "twenty-one",
        90: "ninety",
        99: "ninety-nine",
    }
    assert {number: number_in_words(number) for number in numbers} == numbers


def test_arithmetic_asks_every_problem_in_every_wording():
    task = load("arithmetic", max_operand=1)
    asked = {example.question: example.answer for example in (*task.train, *task.heldout)}
    sums = {"0 + 0": 0, "0 + 1": 1, "1 + 0": 1, "1 + 1": 2, "0 - 0": 0, "1 - 0": 1, "1 - 1": 0}
    in_digits = {f"{problem} =": str(value) for problem, value in sums.items()}
    assert {question: answer for question, answer in asked.items() if question in in_digits} == in_digits
    assert len(asked) == 4 * len(sums)
    assert asked["one plus 1 ="] == asked["1 plus one ="] == asked["one plus one ="] == "2"
    assert asked["one minus zero ="] == "1"


@pytest.mark.parametrize(("form", "question"), [("digits", "1 + 0 ="), ("words", "one plus zero =")])
def test_arithmetic_form(form, question):
    task = load("arithmetic", max_operand=1, operations=["plus"], forms=form)
    questions = [example.question for example in (*task.train, *task.heldout)]
    assert question in questions
    assert len(questions) == 4


def test_arithmetic_holds_out_problems_not_strings():
    task = load("arithmetic", max_operand=20, heldout_fraction=0.2)

    def problems(examples):
        return {
            (data["operation"], *sorted((data["left"], data["right"])))
            for data in (example.metadata for example in examples)
        }

    train, heldout = problems(task.train), problems(task.heldout)
    assert train.isdisjoint(heldout)
    # 21 * 22 / 2 = 231 unordered pairs per operation, 46 of them held out.
    assert (len(train), len(heldout)) == (2 * (231 - 46), 2 * 46)
    assert all(int(example.answer) >= 0 for example in (*task.train, *task.heldout))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_operand": 0}, "task.max_operand=0 must lie in 1..99: try task.max_operand=9"),
        ({"max_operand": 100}, "task=chain_sum"),
        ({"operations": []}, r"task.operations=\[plus\]"),
        ({"operations": ["plus", "plus"]}, r"task.operations=\[plus\]"),
        ({"operations": ["times"]}, "'times', allowed are"),
        ({"forms": "roman"}, "task.forms=mixed"),
        ({"heldout_fraction": 0.0}, "task.heldout_fraction=0.1"),
        ({"heldout_fraction": 1.0}, "task.heldout_fraction=0.1"),
    ],
)
def test_arithmetic_refuses(overrides, message):
    with pytest.raises(ValueError, match=message):
        load("arithmetic", **overrides).validate()


def test_chain_sum_neighbouring_seeds_share_no_shifted_questions():
    first, second = (load("chain_sum", seed=seed).train for seed in (1, 2))
    same = sum(first[index + 1].question == second[index].question for index in range(200))
    assert same < 20  # one in 200 by chance; all but one if the seed were handed on as it is


def test_reasoning_gym_questions_do_not_follow_pythons_own_generator():
    """Of list_functions some draw from it."""

    def questions(seed):
        random.seed(seed)
        task = load("reasoning_gym", dataset="list_functions", heldout_size=4)
        found = [task.train[position].question for position in range(60)]
        assert random.random() == random.Random(seed).random()  # nobody else's draws change
        return found

    assert questions(1) == questions(2)


def test_reasoning_gym_threshold_keeps_partial_credit_or_not():
    strict = load("reasoning_gym", dataset="caesar_cipher")
    partial = dataclasses.replace(strict, threshold=0.3)
    example = Example("?", "abc", {})
    # The scorer pays len(answer) / len(response) for containing the answer: 3 / 5 and 3 / 12.
    assert [task.score("abc d", example) for task in (strict, partial)] == [0.0, 0.6]
    assert [task.score("abc and more", example) for task in (strict, partial)] == [0.0, 0.0]


def test_reasoning_gym_scorer_that_raises_on_junk_pays_nothing():
    task = load("reasoning_gym", dataset="prime_factorization")
    example = task.train[0]
    with pytest.raises(ValueError, match="invalid literal"):
        task._datasets["train"].score_answer("((", {"answer": example.answer, "metadata": example.metadata})
    assert task.score("((", example) == 0.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"dataset": "chain_sums"}, "'chain_sums' is no reasoning-gym dataset; it has .*'chain_sum'"),
        ({"dataset": "graph_color"}, "graph_color gives no answers.*task.dataset="),
        ({"dataset": "game_of_life_halting"}, "pays 1 for .*task.verifier=exact"),
        ({"arguments": {"min_words": 3}}, "refuses task.arguments={'min_words': 3}.*unexpected keyword"),
        ({"arguments": {"seed": 3}}, "task.arguments has 'seed'"),
        ({"train_size": 0}, "task.train_size=64"),
        ({"threshold": 0.0}, "task.threshold=1.0"),
        ({"verifier": "fuzzy"}, "task.verifier='fuzzy' is none of .*task.verifier=dataset"),
        ({"dataset": "word_sorting", "verifier": "numeric"}, "pays 0 for word_sorting's own answer"),
    ],
)
def test_reasoning_gym_refuses(overrides, message):
    with pytest.raises(ValueError, match=message):
        load("reasoning_gym", **overrides).validate()


def test_reasoning_gym_too_few_questions():
    with pytest.raises(ValueError, match=r"too few for task.heldout_size=300: use task.heldout_size=\d+"):
        _ = load("chain_sum", heldout_size=300).heldout


def test_reasoning_gym_gives_up_on_a_question_that_does_not_come():
    """Of 200 questions 100,000 cannot be held out; 400,000 draws would take a minute to find that."""
    task = load("chain_sum", heldout_size=100_000)
    with pytest.raises(ValueError, match=r"has about (1\d\d|200) different questions, too few"):
        _ = task.heldout


def test_reasoning_gym_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'torpor\[tasks\]'"):
        load("chain_sum").validate()


def test_jsonl_keeps_order_of_a_second_file_and_drops_its_prompts_from_train(tmp_path):
    rows = [{"q": f"question {n}", "a": f"{n}", "level": n} for n in range(6)]
    task = load(
        "jsonl",
        path=jsonl_file(tmp_path / "train.jsonl", [*rows, "\n", rows[2]]),
        heldout_path=jsonl_file(tmp_path / "test.jsonl", [rows[4], rows[2]]),
        prompt_field="q",
        answer_field="a",
    )
    assert task.heldout == (
        Example("question 4", "4", {"level": 4}),
        Example("question 2", "2", {"level": 2}),
    )
    assert sorted(example.answer for example in task.train) == ["0", "1", "3", "5"]


def test_jsonl_fraction_counts_different_prompts(tmp_path):
    rows = [{"prompt": f"{n % 10}?", "answer": f"{n}"} for n in range(40)]
    task = load("jsonl", path=jsonl_file(tmp_path / "repeats.jsonl", rows), heldout_fraction=0.3)
    assert len({example.question for example in task.heldout}) == 3
    assert (len(task.heldout), len(task.train)) == (12, 28)


GOOD = {"prompt": "2 + 3 =", "answer": "5"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{'prompt': 1}\n", "bad.jsonl, line 3 is not JSON"),
        ("[1]\n", "bad.jsonl, line 3 holds a list, must hold an object"),
        ({"answer": "5"}, r"line 3: no field 'prompt' \(it has \['answer'\]\).*task.prompt_field="),
        ({"prompt": "x", "label": "5"}, "line 3: no field 'answer'.*task.answer_field="),
        ({"prompt": ["x"], "answer": "5"}, r"line 3: field 'prompt' is \['x'\], must be str"),
        ({"prompt": "x", "answer": None}, "line 3: field 'answer' is None, must be str or int or float"),
        ({"prompt": "x", "answer": " "}, "not blank"),
        ({"prompt": "x", "answer": "five"}, "line 3: verifier 'numeric' pays 0 for the answer 'five' itself"),
    ],
)
def test_jsonl_bad_line(tmp_path, bad, message):
    task = load("jsonl", path=jsonl_file(tmp_path / "bad.jsonl", [GOOD, GOOD, bad]), verifier="numeric")
    task.validate()  # reads the first line only
    with pytest.raises(ValueError, match=message):
        _ = task.train
    with pytest.raises(ValueError, match=message.replace("line 3", "line 1")):
        load("jsonl", path=jsonl_file(tmp_path / "bad.jsonl", [bad]), verifier="numeric").validate()


@pytest.mark.parametrize("number", ["0.00005", "5e-05", "-0.10", "1.0", "1E400", "7", "-" + "123456789" * 9])
@pytest.mark.parametrize("verifier", ["exact", "numeric", "last_number"])
def test_jsonl_number_is_the_answer_as_it_is_written(tmp_path, number, verifier):
    lines = [f'{{"prompt": "{n}", "answer": {number}, "other": 0.5}}\n' for n in range(2)]
    task = load("jsonl", path=jsonl_file(tmp_path / "numbers.jsonl", lines), verifier=verifier)
    example = task.train[0]
    assert (example.answer, example.metadata) == (number, {"other": 0.5})
    assert [task.score(text, example) for text in (number, "-5", "5")] == [1.0, 0.0, 0.0]


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a\\ud83d", "answer": "b"}', r"line 2: its question holds '\\ud83d', half of a character"),
        ('{"prompt": "a", "answer": "\\udc00b"}', r"line 2: its answer holds '\\udc00', half of a character"),
        (f'{{"prompt": "a", "answer": "b", "more": {DEEP}}}', r"line 2 is nested too deep"),
        (DEEP, r"line 2 is nested too deep"),
        ('{"prompt": "a", "answer": NaN}', "line 2: field 'answer' is nan, must be a finite number"),
        ('{"prompt": "a", "answer": -Infinity}', "line 2: field 'answer' is -inf, must be a finite number"),
    ],
)
def test_jsonl_text_that_python_reads_and_nobody_can_train_on(tmp_path, line, message):
    task = load("jsonl", path=jsonl_file(tmp_path / "bad.jsonl", [GOOD, line + "\n", GOOD]))
    with pytest.raises(ValueError, match=f"bad.jsonl, {message}"):
        _ = task.train


def test_an_example_is_text_that_can_be_encoded():
    for question, answer, message in (
        ("\ud83d", "1", "its question holds '.ud83d', half of a character"),
        ("a", "\udc00", "question='a': its answer holds"),
        ("1 + 1", 2, r"question='1 \+ 1': its answer is 2, a int, must be text"),
    ):
        with pytest.raises(ValueError, match=message):
            Example(question, answer)


def test_examples_of_a_file_know_their_lines(tmp_path):
    path = jsonl_file(tmp_path / "lines.jsonl", [GOOD, "\n", {"prompt": "1 + 1 =", "answer": "2"}])
    task = load("jsonl", path=path)
    origins = {example.answer: example.origin for example in (*task.train, *task.heldout)}
    assert origins == {"5": f"{path}, line 1", "2": f"{path}, line 3"}


def test_jsonl_bytes_that_are_no_text(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é", "answer": "e"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.jsonl, line 1 is no UTF-8 text"):
        load("jsonl", path=str(tmp_path / "latin.jsonl")).validate()


def test_jsonl_refuses_files_that_cannot_be_split(tmp_path):
    with pytest.raises(ValueError, match=r"task.path=gone.jsonl is no file .*task.path="):
        load("jsonl", path="gone.jsonl").validate()
    with pytest.raises(ValueError, match=r"empty.jsonl has no lines"):
        load("jsonl", path=jsonl_file(tmp_path / "empty.jsonl", ["\n"])).validate()
    path = jsonl_file(tmp_path / "one.jsonl", [GOOD, GOOD])
    with pytest.raises(ValueError, match=r"has one prompt.*task.heldout_path="):
        _ = load("jsonl", path=path).train
    with pytest.raises(ValueError, match=r"every prompt of .* task.heldout_path="):
        _ = load("jsonl", path=path, heldout_path=path).train
    with pytest.raises(ValueError, match=r"task.heldout_fraction=2"):
        load("jsonl", path=path, heldout_fraction=2.0).validate()


def test_jsonl_relative_path_is_the_directory_of_the_command(tmp_path, monkeypatch):
    jsonl_file(tmp_path / "here.jsonl", [GOOD, {"prompt": "1 + 1 =", "answer": "2"}])
    monkeypatch.chdir(tmp_path)
    task = load("jsonl", path="here.jsonl")
    task.validate()
    assert {example.answer for example in (*task.train, *task.heldout)} == {"2", "5"}


@pytest.mark.parametrize(
    ("verifier", "response", "answer", "reward"),
    [
        ("exact", " a  b\n", "a b", 1.0),
        ("exact", "ab", "a b", 0.0),
        ("exact", "12.", "12", 0.0),
        ("numeric", "+1,000.0", "1000", 1.0),
        ("numeric", "-.5", "-0.50", 1.0),
        ("numeric", "1000 apples", "1000", 0.0),
        ("numeric", "1e3", "1000", 1.0),
        ("numeric", "5e-5", "0.00005", 1.0),
        ("numeric", "0.00005", "5e-05", 1.0),
        ("numeric", "-5", "5e-05", 0.0),
        ("numeric", "1e99999", "1", 0.0),
        ("numeric", "nan", "nan", 0.0),
        ("numeric", "9" * 5000, "9" * 5000, 1.0),
        ("last_number", "3 and 4 make 7.", "so #### 7", 1.0),
        ("last_number", "7, no, 8", "7", 0.0),
        ("last_number", "none", "7", 0.0),
        ("last_number", "that is -5", "5e-05", 0.0),
        ("last_number", "about 2 times 0.00005", "5e-05", 1.0),
        ("last_number", "about 1" + "0" * 300, "1E+300", 1.0),
        ("contains", "It is PARIS, I think", "Paris", 1.0),
        ("contains", "parisian", "Paris", 0.0),
        ("contains", "c++ of course", "C++", 1.0),
    ],
)
def test_verifier(verifier, response, answer, reward):
    assert verify(verifier, response, Example("?", answer)) == reward


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_verifiers_pay_nothing_for_random_text(verifier):
    example = Example("?", "8191.25")
    assert sum(verify(verifier, random_text(seed), example) for seed in range(500)) == 0.0


def test_verifier_by_dotted_path(tmp_path, monkeypatch):
    (tmp_path / "my_verifiers.py").write_text(
        "scale = 2\n"
        "def half(response, example):\n    return 0.5 * (response == example.metadata['secret'])\n"
        "def double(response, example):\n    return 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"prompt": f"{n}", "answer": "unused", "secret": f"s{n}"} for n in range(4)]
    path = jsonl_file(tmp_path / "secret.jsonl", rows)
    task = load("jsonl", path=path, verifier="my_verifiers.half")
    task.validate()
    rewards = {example.question: task.score("s3", example) for example in (*task.train, *task.heldout)}
    assert rewards == {"0": 0.0, "1": 0.0, "2": 0.0, "3": 0.5}
    with pytest.raises(ValueError, match=r"my_verifiers.double returned 2.0 for 'x'; rewards lie in \[0, 1\]"):
        verify("my_verifiers.double", "x", Example("?", "x"))
    for name, message in {
        "fuzzy": "task.verifier='fuzzy' is none of",
        "my_verifiers.gone": "task.verifier=my_verifiers.gone cannot be imported: .*has no attribute 'gone'",
        "my_verifier.half": "task.verifier=my_verifier.half cannot be imported: No module named .*PYTHONPATH",
        "my_verifiers.scale": "is a int, must be a function",
    }.items():
        with pytest.raises(ValueError, match=message):
            resolve_verifier(name)


def test_tasks_import_without_torch():
    code = (
        "import sys, trainer.tasks.tokenizer\n"
        "import trainer.tasks.arithmetic, trainer.tasks.jsonl, trainer.tasks.reasoning_gym\n"
        "print(sorted({'torch', 'transformers', 'reasoning_gym', 'omegaconf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

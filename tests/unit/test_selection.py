"""Prompts and answers are measured before a run: what is too long is named, left out or shortened, and counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import ClassVar

import pytest
from rich.console import Console

from tests.helpers.composing import config_of
from tests.helpers.interviews import Interview
from tests.helpers.megatron_world import one_rank_world
from trainer.config.pieces import make_task
from trainer.config.schema import Config
from trainer.data.encoding import Encoder
from trainer.data.prompts import Prompts
from trainer.data.selection import Selection, digest_of, drawn_positions, select, stand_in
from trainer.tasks import Environment, Example, Task
from trainer.tasks.tokenizer import light_tokenizer, load_tokenizer

SIZES = ("rollout.max_prompt_tokens=8", "rollout.max_new_tokens=4", "algo.num_steps=2", "algo.prompts_per_step=64")
LONG = {"prompt": "1234567890", "answer": "1"}  # every digit is a token
FITS = {"prompt": "12345678", "answer": "123"}


def selected(config: Config, task: Environment | None = None, *, console: Console | None = None) -> Selection:
    task = task or make_task(config)
    tokenizer = light_tokenizer(None, task=task, vocab_size=320)
    encoder = Encoder(config.tokenizer, tokenizer)
    return select(config, task, encoder=encoder, console=console or Console(file=StringIO()))


def prompts_of(config: Config, task: Environment) -> Prompts:
    tokenizer = load_tokenizer(None, task=task, vocab_size=320)
    return Prompts(config, task=task, tokenizer=tokenizer, selection=selected(config, task))


@pytest.fixture
def files(tmp_path):
    """Writes 400 short questions and, as line 17, ``train``; likewise 40 and, as line 5, ``heldout``. The overrides."""

    def write(*, train: dict[str, str] = FITS, heldout: dict[str, str] = FITS) -> list[str]:
        for name, count, line, row in (("train", 400, 17, train), ("heldout", 40, 5, heldout)):
            rows = [{"prompt": f"{n:03} {name[0]}=", "answer": str(n % 10)} for n in range(count)]
            rows.insert(line - 1, row)
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths = [f"task.path={tmp_path / 'train.jsonl'}", f"task.heldout_path={tmp_path / 'heldout.jsonl'}"]
        return ["task=jsonl", *paths, *SIZES]

    return write


def test_questions_that_fit_are_counted(files):
    config = config_of(*files(heldout=FITS | {"prompt": "87654321"}))
    digest = digest_of(make_task(config))
    counts = "401 training and 41 held-out questions"
    assert selected(config) == Selection(digest, frozenset(), frozenset(), counts)


def test_one_long_prompt_among_401_lines_is_named_although_it_would_not_be_drawn(files):
    config = config_of(*files(train=LONG), "algo.warmup_steps=0", "algo.num_steps=0")
    with pytest.raises(ValueError, match=r"train\.jsonl, line 17: the prompt has 10 tokens, more than ") as caught:
        selected(config)
    for part in (
        "rollout.max_prompt_tokens=8. Of 401 training and 41 held-out questions, 1 texts are too long",
        "use rollout.max_prompt_tokens=10, or leave",
        "data.too_long=drop",
        "data.too_long=truncate",
    ):
        assert part in str(caught.value)
    selected(config_of(*files(train=LONG), "rollout.max_prompt_tokens=10"))


def test_a_long_held_out_prompt_is_named(files):
    with pytest.raises(ValueError, match=r"heldout\.jsonl, line 5: the prompt has 10 tokens"):
        selected(config_of(*files(heldout=LONG)))


def test_a_long_answer_matters_to_the_warm_up_alone(files):
    overrides = files(train={"prompt": "1", "answer": "1234"}, heldout={"prompt": "2", "answer": "1234"})
    complaint = r"line 17: the answer with its end has 5 tokens, more than rollout.max_new_tokens=4\. "
    with pytest.raises(ValueError, match=f"train.jsonl, {complaint}.*1 texts .*use rollout.max_new_tokens=5"):
        selected(config_of(*overrides))
    assert "too long" not in selected(config_of(*overrides, "algo.warmup_steps=0")).summary


INTERVIEW = ("task=guess_number", "rollout.max_new_tokens=4", "algo.warmup_batch_size=64", "algo.prompts_per_step=64")


def test_a_demonstration_of_several_turns_that_does_not_fit_is_named():
    """Before its n-th response stand 2 tokens of the question and 4 of each turn: the response, its end, and 2."""
    config = config_of(*INTERVIEW, "rollout.max_prompt_tokens=29")
    complaint = (
        "training question 7: what was said before a later turn has 30 tokens, more than rollout.max_prompt_tokens"
    )
    with pytest.raises(ValueError, match=f"{complaint}=29. Of 8 .*use rollout.max_prompt_tokens=30"):
        selected(config, Interview(max_turns=8))
    assert "too long" not in selected(config, Interview(max_turns=7)).summary
    dropped = selected(config_of(*INTERVIEW, "rollout.max_prompt_tokens=20", "data.too_long=drop"), Interview(8))
    assert dropped.dropped == {5, 6, 7}
    assert dropped.dropped_heldout == frozenset()  # held-out questions are demonstrated to nobody


def test_a_warm_up_shows_all_turns_or_as_many_as_fit():
    settings = (*INTERVIEW, "rollout.max_prompt_tokens=20", "data.too_long=truncate")
    with one_rank_world():
        prompts = prompts_of(config_of(*settings), Interview(8))
        batch = prompts.supervised_batch(1)
        shown = prompts._demonstrations(list(prompts.environment.train))
        text = [[prompts.tokenizer.decode(part) for turn in turns for part in turn] for turns in shown]
    assert text[2] == ["q3", "a<eos>", "+1", "a<eos>", "+2", "a<eos>"]
    assert [len(turns) for turns in shown] == [1, 2, 3, 4, 5, 5, 5, 5]
    for row, mask in zip(batch.tokens, batch.response_mask, strict=True):
        learned = prompts.tokenizer.decode(row[1:][mask].tolist())
        assert learned == "a<eos>" * (int(mask.sum()) // 2)
        assert 1 <= int(mask.sum()) // 2 <= 5
        spoken = [part for part in prompts.tokenizer.decode(row.tolist()).replace("<pad>", "").split("a<eos>") if part]
        assert spoken[1:] == [f"+{turn}" for turn in range(1, len(spoken))]


def test_an_empty_prompt_is_refused():
    task = ListTask(["1 + 1 =", ""])
    with pytest.raises(ValueError, match="training question 1: the prompt has no tokens"):
        selected(config_of(*SIZES, "data.too_long=drop"), task)


def test_long_questions_are_left_out_and_counted(files):
    config = config_of(*files(train=LONG, heldout=LONG | {"prompt": "0987654321"}), "data.too_long=drop")
    with one_rank_world():
        task = make_task(config)
        selection, prompts = selected(config, task), prompts_of(config, task)
        (long,), (long_heldout,) = selection.dropped, selection.dropped_heldout
        assert task.train[long].question == "1234567890"
        assert task.heldout[long_heldout].question == "0987654321"
        assert selection.summary == (
            "401 training and 41 held-out questions; 1 and 1 of them too long (up to 10 tokens), left out"
        )
        assert [example.question for example in prompts.heldout(100)] == [
            example.question for example in task.heldout if example.question != "0987654321"
        ]
        step = next(n for n in range(1, 99) if long in drawn_positions(config, "prompts", n, count=64, population=401))
        drawn = [example.question for example in prompts.for_step(step)]
        assert "1234567890" not in drawn
        assert task.train[(long + 1) % 401].question in drawn


def test_without_long_questions_dropping_changes_no_draw(files):
    with one_rank_world():
        questions = [
            [example.question for example in prompts_of(config, make_task(config)).for_step(3)]
            for config in (config_of(*files()), config_of(*files(), "data.too_long=drop"))
        ]
        assert questions[0] == questions[1]


def test_nothing_left_is_an_error(files):
    long = {"rollout.max_prompt_tokens=3", "data.too_long=drop"}
    with pytest.raises(ValueError, match=r"leaves no training question: .*train.jsonl, line .* has 5 tokens"):
        selected(config_of(*files(), *long))


def test_long_prompts_and_answers_are_shortened_and_counted(files):
    train = {"prompt": "1234567890", "answer": "123456"}
    config = config_of(*files(train=train, heldout=LONG | {"prompt": "0987654321"}), "data.too_long=truncate")
    with one_rank_world():
        task = make_task(config)
        selection, prompts = selected(config, task), prompts_of(config, task)
        assert (selection.dropped, selection.dropped_heldout) == (frozenset(), frozenset())
        assert selection.summary.endswith("1 and 1 of them too long (up to 10 tokens), shortened")
        (example,) = (example for example in task.train if example.answer == "123456")
        (((ids, answer),),) = prompts._demonstrations([example])
        assert prompts.tokenizer.decode(ids) == "34567890"  # its end is kept
        assert prompts.tokenizer.decode(answer) == "1234"  # a response that is cut off has no end


@dataclass(frozen=True)
class ListTask(Task):
    """Questions from a list; ``lazy``: made when they are asked for."""

    questions: list[str]
    lazy: bool = False

    @property
    def train(self) -> Sequence[Example]:
        return Made(self.questions) if self.lazy else [Example(question, "1") for question in self.questions]

    @property
    def heldout(self) -> Sequence[Example]:
        return [Example("0 + 0 =", "0")]

    def score(self, response: str, example: Example) -> float:
        return 1.0

    def validate(self) -> None:
        pass


@dataclass
class Made(Sequence[Example]):
    asked: ClassVar[set[int]] = set()
    questions: list[str]

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        self.asked.add(index)
        return Example(self.questions[index], "1")


@pytest.fixture
def made():
    Made.asked.clear()
    return Made.asked


RUN = (
    *SIZES,
    *("algo.warmup_steps=1", "algo.warmup_batch_size=8", "algo.warmup_questions=null"),
    *("algo.num_steps=1", "algo.prompts_per_step=8", "algo.micro_batch_size=4"),
)


def test_of_questions_that_are_made_only_those_of_the_run_are_measured(made):
    config = config_of(*RUN)
    task = ListTask([f"{n} =" for n in range(5000)], lazy=True)
    drawn = set()
    for purpose in ("warm_up", "prompts"):
        drawn |= set(drawn_positions(config, purpose, 1, count=8, population=5000))
    made.clear()
    summary = selected(config, task).summary
    corpus_and_sample = set(range(2048))  # which trains the tokenizer
    assert made - corpus_and_sample == drawn - corpus_and_sample
    counts = "5000 training and 1 held-out questions"
    assert summary == f"{counts}, of which the {len(drawn)} that the run can draw were measured"


def test_a_stand_in_that_is_too_long_has_a_stand_in_too(made):
    config = config_of(*RUN, "data.too_long=drop")
    first = min(drawn_positions(config, "prompts", 1, count=8, population=5000))
    questions = [f"{n} =" for n in range(5000)]
    for position in (first, first + 1, first + 2):
        questions[position] = "1234567890"
    selection = selected(config, ListTask(questions, lazy=True))
    assert selection.dropped == {first, first + 1, first + 2}
    assert stand_in(first, dropped=selection.dropped, population=5000) == first + 3
    assert stand_in(4999, dropped={4999, 0}, population=5000) == 1


def test_the_digest_is_of_all_that_is_held_and_of_some_that_is_made(made):
    questions = [f"{n} =" for n in range(50)]
    changed = [*questions[:-1], "other"]
    assert digest_of(ListTask(questions)) == digest_of(ListTask(list(questions)))
    assert digest_of(ListTask(questions)) != digest_of(ListTask(changed))
    digest_of(ListTask(changed, lazy=True))
    assert made == set(range(16))
    assert digest_of(ListTask(questions, lazy=True)) != digest_of(ListTask(questions[::-1], lazy=True))


def test_many_questions_have_a_progress_bar_on_a_terminal():
    shown = []
    for terminal, count in ((True, 2001), (True, 20), (False, 2001)):
        console = Console(file=StringIO(), force_terminal=terminal)
        selected(config_of(*SIZES), ListTask([f"{n} =" for n in range(count)]), console=console)
        shown.append("measuring each training question" in console.file.getvalue())  # type: ignore[attr-defined]
    assert shown == [True, False, False]

"""How questions become prompts: begun and not ended as a text, the same on every day, shortened without harm."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from tokenizers import processors

from tests.helpers.composing import config_of
from trainer.config.schema import TokenizerConfig
from trainer.data.encoding import Encoder
from trainer.tasks.arithmetic import ArithmeticTask
from trainer.tasks.tokenizer import light_tokenizer, load_tokenizer

TASK = ArithmeticTask(max_operand=9, operations=["plus", "minus"], forms="mixed", heldout_fraction=0.1, seed=1)
PLAIN = TokenizerConfig(path=None, vocab_size=320, chat_template=False, digest=None)
CHAT = TokenizerConfig(path="chat", vocab_size=320, chat_template=True, digest=None)
TURN = "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
GENERATE = "{% if add_generation_prompt %}assistant:{% endif %}"
TEXTS = ["7 + 5 =", "seven plus 5 =", "<eos> is text", "ünï 🙂", "a"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(None, task=TASK, vocab_size=320)


def chat(tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return Encoder(CHAT, tokenizer)


def with_processor(tokenizer, processor):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


def test_the_parents_bare_tokenizer_encodes_as_the_workers(tokenizer):
    bare = Encoder(PLAIN, light_tokenizer(None, task=TASK, vocab_size=320))
    full = Encoder(PLAIN, tokenizer)
    expected = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    assert bare.questions(TEXTS) == full.questions(TEXTS) == expected
    assert bare.answers(TEXTS) == full.answers(TEXTS) == [[*ids, tokenizer.eos_token_id] for ids in expected]


@pytest.mark.parametrize(
    ("template", "begins"),
    [("$A <eos>", []), ("<bos> $A <eos>", [1]), ("<bos> $A", [1]), ("<bos> <bos> $A <eos> <pad>", [1, 1])],
)
def test_a_prompt_begins_as_the_tokenizer_begins_a_text_and_does_not_end_as_one(tokenizer, template, begins):
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<pad>", "<bos>", "<eos>")]
    processor = processors.TemplateProcessing(single=template, special_tokens=special)
    encoder = Encoder(PLAIN, with_processor(tokenizer, processor))
    assert encoder.questions(TEXTS) == [begins + tokenizer.encode(text) for text in TEXTS]
    assert encoder.answers(TEXTS) == [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in TEXTS]


def test_a_sentence_pair_model_appends_its_separator(tokenizer):
    encoder = Encoder(PLAIN, with_processor(tokenizer, processors.BertProcessing(("<eos>", 2), ("<bos>", 1))))
    assert encoder.questions(TEXTS) == [[1, *tokenizer.encode(text)] for text in TEXTS]


def test_saved_limits_of_a_tokenizer_do_not_cut_prompts(tokenizer):
    limited = copy.deepcopy(tokenizer)
    limited.backend_tokenizer.enable_truncation(2)
    limited.backend_tokenizer.enable_padding(length=20)
    assert Encoder(PLAIN, limited).questions(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize(
    "date",
    [
        "{{ strftime_now('%d %b %Y') }}",
        '{% if strftime_now is defined %}{{ strftime_now( "%d %b %Y" ) }}{% else %}never{% endif %}',
    ],
)
def test_a_template_that_asks_for_the_date_gets_a_fixed_one(tokenizer, date):
    (ids,) = chat(tokenizer, f"Today is {date}. " + TURN + GENERATE).questions(["1 + 1"])
    assert tokenizer.decode(ids) == "Today is 26 Jul 2024. <bos>user: 1 + 1\nassistant:"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% set f = '%c' %}{{ strftime_now(f) }}" + TURN + GENERATE, "uses strftime_now other than .* fixed format"),
        ("{% set now = strftime_now %}{{ now('%c') }}" + TURN + GENERATE, "uses strftime_now other than"),
        ("{{ ['Hi', 'Hello'] | random }}" + TURN + GENERATE, "gives another prompt each time"),
        (TURN + "{{ eos_token }}", "ends a prompt as a finished text .with token 2."),
        (None, "tokenizer.path=chat has none: use tokenizer.chat_template=false"),
    ],
)
def test_a_template_without_use_is_refused(tokenizer, template, message):
    unsplit = copy.deepcopy(tokenizer)
    unsplit.split_special_tokens = False  # as a folder's tokenizer reads them out of text
    with pytest.raises(ValueError, match=message):
        chat(unsplit, template)


def test_a_template_that_ends_a_prompt_with_another_end_of_the_model_is_refused(tokenizer, tmp_path):
    """``<bos>`` stands for the ``<|eot_id|>`` that a chat model's generation_config.json adds to the ends."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    config = config_of()
    actor = config.roles["actor"]
    actor = dataclasses.replace(actor, model=dataclasses.replace(actor.model, path=str(tmp_path)))
    config = dataclasses.replace(config, tokenizer=CHAT, roles={**config.roles, "actor": actor})
    chatting = copy.deepcopy(tokenizer)
    chatting.split_special_tokens = False
    chatting.chat_template = TURN + "{{ bos_token }}"
    with pytest.raises(ValueError, match=r"ends a prompt as a finished text .with token 1."):
        Encoder.of(config, chatting)
    chatting.chat_template += GENERATE
    assert Encoder.of(config, chatting).questions(["1"])


@pytest.mark.parametrize("most", [3, 4, 7])
def test_a_question_is_shortened_at_its_beginning(tokenizer, most):
    encoder, text = Encoder(PLAIN, tokenizer), "first 1234567 then 89 + 1 ="
    ids = encoder.shortened(text, most=most)
    assert len(ids) == most
    assert text.endswith(tokenizer.decode(ids))
    assert encoder.shortened("7 + 5 =", most=20) == tokenizer.encode("7 + 5 =")


def test_a_chat_template_stays_whole_around_a_shortened_question(tokenizer):
    encoder = chat(tokenizer, TURN + GENERATE)
    (around,) = encoder.questions([""])
    ids = encoder.shortened("123456789 🙂 + 4", most=len(around) + 3)
    assert len(ids) <= len(around) + 3
    assert tokenizer.decode(ids) == "<bos>user:  + 4\nassistant:"
    needed = 2 * len(around)
    with pytest.raises(ValueError, match=f"{len(around)} tokens: use rollout.max_prompt_tokens={needed} or more"):
        encoder.shortened("12345", most=len(around) - 1)


def test_an_encoder_takes_the_real_config(tokenizer):
    assert Encoder(config_of().tokenizer, tokenizer).questions(["1"]) == [tokenizer.encode("1")]


def test_what_an_environment_answers_follows_the_response_as_it_is(tokenizer):
    encoder = Encoder(PLAIN, tokenizer)
    assert encoder.replies([" 12 =", "<eos>"], ends=[5, 6]) == [tokenizer.encode(text) for text in (" 12 =", "<eos>")]
    assert encoder.replies([], ends=[]) == []


def test_in_a_chat_template_it_is_the_users_next_turn(tokenizer):
    """Which begins with the end of the assistant's, unless the response has ended itself."""
    unsplit = copy.deepcopy(tokenizer)
    unsplit.split_special_tokens = False
    template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<eos>\n{% endfor %}" + GENERATE
    encoder, eos = chat(unsplit, template), tokenizer.eos_token_id
    ended, cut = encoder.replies(["try again", "try again"], ends=[eos, 9])
    assert tokenizer.decode(ended) == "\nuser:try again<eos>\nassistant:"
    assert cut == [eos, *ended]
    question, turn = encoder.questions(["2 + 2"])[0], encoder.answers(["(response)"])[0]
    conversation = [("user", "2 + 2"), ("assistant", "(response)"), ("user", "try again")]
    messages = [{"role": role, "content": content} for role, content in conversation]
    whole = unsplit.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode([*question, *turn, *ended]) == whole


def test_a_template_that_changes_the_assistants_turn_allows_no_second_one(tokenizer):
    template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}" + GENERATE
    with pytest.raises(ValueError, match="does not write an assistant's turn as it is, so no turn can follow"):
        chat(tokenizer, template).replies(["more"], ends=[3])

"""Which tokens end a response: those of the tokenizer and of both files of the model's folder."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.composing import config_of
from tests.helpers.roles import fresh_saver, make_role, small_config
from trainer.config.pieces import make_task
from trainer.memory.saver import make_saver
from trainer.models.generation import end_token_ids, generation_settings, vocabulary_settings
from trainer.rollout.engines import make_engine
from trainer.tasks.tokenizer import load_tokenizer

MODEL = config_of().roles["actor"].model
TOKENIZER = SimpleNamespace(
    eos_token_id=2, bos_token_id=1, pad_token_id=0, get_vocab=lambda: {"a": 0, "b": 1, "c": 2, "d": 19}
)


def ends(folder, **files):
    """Those of a folder with these files, each a mapping or raw text."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return end_token_ids(dataclasses.replace(MODEL, path=str(folder)), TOKENIZER)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": [2, 19]}, {}, (2, 19)),
        ({"eos_token_id": [19, 2]}, {"eos_token_id": 2}, (19, 2)),
        ({}, {"eos_token_id": [7, 2]}, (7, 2)),
        ({"eos_token_id": 7}, {"eos_token_id": 8}, (7, 8, 2)),
        ({"eos_token_id": None}, {"eos_token_id": None}, (2,)),
    ],
)
def test_ends_are_those_of_both_files_and_the_tokenizer(tmp_path, generation_config, config, expected):
    assert ends(tmp_path, generation_config=generation_config, config=config) == expected


def test_without_a_folder_or_its_files_the_tokenizer_decides(tmp_path):
    assert ends(tmp_path) == (2,)
    assert end_token_ids(MODEL, TOKENIZER) == (2,)  # type: ignore[arg-type]
    assert generation_settings(MODEL) == {}


@pytest.mark.parametrize("given", ["2", [2, None], [2, -1], 2.0, True, {"id": 2}])
@pytest.mark.parametrize("file", ["generation_config", "config"])
def test_what_is_no_token_id_is_refused_with_its_file(tmp_path, file, given):
    with pytest.raises(ValueError, match=rf"{file}.json has eos_token_id=.*, must be a token id, a list of"):
        ends(tmp_path, **{file: {"eos_token_id": given}})


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[1]", "holds a list, must hold an object")])
def test_a_damaged_file_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"generation_config.json {message}"):
        ends(tmp_path, generation_config=text)


def test_one_end_is_a_number_in_a_config_and_several_are_a_list(tmp_path):
    assert vocabulary_settings(MODEL, TOKENIZER) == {  # type: ignore[arg-type]
        "vocab_size": 20,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 19]}')
    model = dataclasses.replace(MODEL, path=str(tmp_path))
    assert vocabulary_settings(model, TOKENIZER)["eos_token_id"] == [2, 19]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["hf", "native"])
def test_an_engine_ends_a_response_at_every_end(world, tmp_path, name):
    """The third token of a response becomes an end; it is no special token."""
    overrides = (f"rollout={name}", "model.dtype=fp32", "model.init_std=0.3", "rollout.max_new_tokens=6")
    config = small_config(*overrides)
    tokenizer = load_tokenizer(None, task=make_task(config), vocab_size=config.tokenizer.vocab_size)

    def responses(folder):
        fresh_saver()
        actor = make_role("actor", *overrides, vocab_size=len(tokenizer))
        actor.config = dataclasses.replace(actor.config, model=dataclasses.replace(actor.config.model, path=folder))
        observer = [].append
        engine = make_engine(config, actor=actor, tokenizer=tokenizer, saver=make_saver(config), observer=observer)
        actor.sleep()
        engine.sync(actor)
        with engine.awake():
            return engine.generate([[10, 11, 12], [20]], seed=1, greedy=True)

    whole = responses(None)
    drawn = whole.tokens[0, 3:9].tolist()
    assert whole.truncated[0]
    end = drawn[2]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id, end]}))
    ended = responses(str(tmp_path))
    kept = drawn[: drawn.index(end) + 1]
    assert ended.tokens[0, 3:][ended.response_mask[0, 3:]].tolist() == kept
    assert not ended.truncated[0]
    assert ended.texts[0] == tokenizer.decode(kept[:-1], skip_special_tokens=True)
    assert torch.equal(ended.log_probs[0, 3 : 3 + len(kept)], whole.log_probs[0, 3 : 3 + len(kept)])

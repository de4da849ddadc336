"""The tokenizer: any text survives it, training it twice gives the same one, unfit folders are refused."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from trainer.tasks.arithmetic import ArithmeticTask
from trainer.tasks.tokenizer import (
    BOS,
    EOS,
    PAD,
    SMALLEST_VOCAB_SIZE,
    check_vocab_size,
    load_tokenizer,
    vocab_size_of,
    vocabulary_size,
)

SETTINGS = {
    "max_operand": 9,
    "operations": ["plus", "minus"],
    "forms": "mixed",
    "heldout_fraction": 0.1,
    "seed": 1,
}
TASK = ArithmeticTask(**SETTINGS)
UNICODE = [
    "naïve  Café",
    "你好 🙂",
    "tab\tand\nnewline ",
    "",
    "\x00\x7f",
    "a <eos> b <pad>",
    "don't , stop .",
    "-12,345.6",
]


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_any_text_round_trips():
    tokenizer = load_tokenizer(None, task=TASK, vocab_size=320)
    draw = random.Random(0)
    noise = ["".join(chr(draw.randrange(0xD800)) for _ in range(20)) for _ in range(200)]
    for text in (*UNICODE, *noise):
        token_ids = encode(tokenizer, text)
        assert tokenizer.decode(token_ids) == tokenizer.decode(token_ids, skip_special_tokens=True) == text


def test_special_tokens_come_first_and_never_out_of_text():
    tokenizer = load_tokenizer(None, task=TASK, vocab_size=320)
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == (PAD, BOS, EOS)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert min(encode(tokenizer, "<pad><bos><eos>")) > 2
    assert tokenizer("7 + 5 =")["input_ids"] == encode(tokenizer, "7 + 5 =")


def test_digits_stand_alone_and_words_of_the_task_merge():
    tokenizer = load_tokenizer(None, task=TASK, vocab_size=320)
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, "1234")) == ["1", "2", "3", "4"]
    pieces = [tokenizer.decode([token_id]) for token_id in encode(tokenizer, "seven plus 5 =")]
    assert pieces == ["seven", " plus", " ", "5", " ="]


def test_same_corpus_same_bytes_in_another_process():
    code = (
        "from trainer.tasks.arithmetic import ArithmeticTask; from trainer.tasks.tokenizer import load_tokenizer\n"
        f"task = ArithmeticTask(**{SETTINGS})\n"
        "print(load_tokenizer(None, task=task, vocab_size=320).backend_tokenizer.to_str())"
    )
    outputs = {load_tokenizer(None, task=TASK, vocab_size=320).backend_tokenizer.to_str()}
    for hash_seed, threads in (("1", "1"), ("2", "2")):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        outputs.add(done.stdout.strip())
    assert len(outputs) == 1


def test_the_vocabulary_is_known_without_a_model(tmp_path):
    trained = load_tokenizer(None, task=TASK, vocab_size=320)
    trained.add_tokens(["<tool>"])
    trained.save_pretrained(tmp_path)
    assert vocab_size_of(None, task=TASK, vocab_size=320) == len(trained) - 1
    assert vocab_size_of(str(tmp_path), task=TASK, vocab_size=400) == len(trained)


def test_saved_folder_and_pickle_are_the_same_tokenizer(tmp_path):
    trained = load_tokenizer(None, task=TASK, vocab_size=320)
    trained.save_pretrained(tmp_path)
    for other in (
        load_tokenizer(str(tmp_path), task=TASK, vocab_size=320),
        pickle.loads(pickle.dumps(trained)),
    ):
        assert other.get_vocab() == trained.get_vocab()
        assert other.pad_token_id == 0
        for text in UNICODE:
            assert encode(other, text) == encode(trained, text)
            assert other.decode(encode(other, text)) == text


def test_vocab_size_must_hold_the_bytes():
    check_vocab_size(SMALLEST_VOCAB_SIZE)
    with pytest.raises(ValueError, match=r"tokenizer.vocab_size=256 is too small .* use tokenizer.vocab_size=259"):
        load_tokenizer(None, task=TASK, vocab_size=256)


def test_a_vocabulary_with_holes_needs_rows_up_to_its_largest_id(tmp_path):
    """Entry 339 beside 309 others."""
    load_tokenizer(None, task=TASK, vocab_size=320).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    assert len(content["model"]["vocab"]) == 309
    content["model"]["vocab"]["<end>"] = 339
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 339, "content": "<end>"})
    file.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path), task=TASK, vocab_size=340)
    assert (len(tokenizer), vocabulary_size(tokenizer)) == (310, 340)
    assert vocab_size_of(str(tmp_path), task=TASK, vocab_size=340) == 340
    assert tokenizer.decode([320, 339, tokenizer.encode("7")[0]]) == "<end>7"  # an id without an entry is no text
    with pytest.raises(ValueError, match=r"310 entries with ids up to 339, .* takes 339: use tokenizer.vocab_size=340"):
        load_tokenizer(str(tmp_path), task=TASK, vocab_size=339)


def save_word_tokenizer(folder, **special_tokens):
    vocab = {"<unk>": 0, "</s>": 1, "word": 2}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special_tokens).save_pretrained(folder)
    return str(folder)


def test_eos_pads_where_there_is_no_pad_token(tmp_path):
    path = save_word_tokenizer(tmp_path, eos_token="</s>")
    tokenizer = load_tokenizer(path, task=TASK, vocab_size=3)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "is not JSON, but cut off"), (b"[]", "holds a list, must hold")]
)
def test_a_damaged_file_of_a_tokenizer_is_named(name, content, message, tmp_path):
    path = save_word_tokenizer(tmp_path, eos_token="</s>")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/{name} {message}"):
        load_tokenizer(path, task=TASK, vocab_size=3)


def test_folders_that_do_not_fit(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, vocab_size, message in (
        ("gone", 300, "tokenizer.path=gone is no folder"),
        (str(tmp_path / "empty"), 300, "has no tokenizer that transformers can load"),
        (save_word_tokenizer(tmp_path / "no_eos"), 300, "has no eos token"),
        (
            save_word_tokenizer(tmp_path / "fits", eos_token="</s>"),
            2,
            "3 entries.*use tokenizer.vocab_size=3",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            load_tokenizer(path, task=TASK, vocab_size=vocab_size)

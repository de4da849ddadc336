"""Damaged JSON is named: the file, the field, what was found, what to do."""

import json
import re

import pytest

from trainer.common.json_files import (
    FLAG,
    NUMBER,
    OBJECT,
    TEXT,
    list_of,
    object_of,
    optional,
    parse_json,
    read_json,
    whole,
)

FIELDS = {
    "step": whole(0),
    "coef": NUMBER,
    "name": TEXT,
    "files": object_of(whole(1, 9)),
    "tags": optional(list_of(TEXT)),
    "on": FLAG,
    "rest": optional(OBJECT),
}
GOOD = {"step": 0, "coef": 1, "name": "", "files": {"a": 9}, "tags": ["x"], "on": False, "more": [1]}


def test_what_is_whole_is_read(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps(GOOD))
    assert read_json(file, advice="-", fields=FIELDS) == GOOD
    assert read_json(file, advice="-") == GOOD
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "y.json", advice="-")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
DAMAGED = {
    "empty": (b"", "is empty: copy it"),
    "blank": (b" \n\n", "is empty: copy it"),
    "pointer": (POINTER, "is a Git LFS pointer and not the file itself: fetch it with git lfs pull"),
    "mark": (b"\xef\xbb\xbf{}", "begins with a byte order mark: save it as UTF-8 without one"),
    "utf16": ("{}".encode("utf-16"), "is UTF-16 text: save it as UTF-8"),
    "page": (b"\n<!DOCTYPE html><html>", "is a web page (HTML): download the file itself"),
    "binary": (b'{"a": "\xff"}', "is no UTF-8 text (byte 7): copy it"),
    "cut": (b'{"a": [1, 2', "is not JSON, but cut off (Expecting ',' delimiter: line 1 column 12 (char 11)): copy it"),
    "cut in text": (b'{"a": "b', "is not JSON, but cut off (Unterminated string"),
    "comma": (b'{"a": 1,}', "is not JSON ("),
    "digits": (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON (Exceeds the limit (4300 digits)"),
    "deep": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is nested too deep to be read: copy it"),
    "list": (b"[1]", "holds a list, must hold an object: copy it"),
    "null": (b"null", "holds null, must hold an object: copy it"),
    "number": (b"3", "holds a number, must hold an object: copy it"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged_is_named(name, tmp_path):
    content, message = DAMAGED[name]
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{re.escape(f'{file} {message}')}"):
        read_json(file, advice="copy it")
    with pytest.raises(ValueError, match=rf"^{re.escape(f'line 3 {message}')}"):
        parse_json(content, where="line 3", advice="copy it")


def test_a_folder_in_a_files_place_is_named(tmp_path):
    with pytest.raises(ValueError, match=rf"^{tmp_path} cannot be read \(Is a directory\): copy it"):
        read_json(tmp_path, advice="copy it")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("step", -1, "has step=-1, must be a whole number of at least 0"),
        ("step", 2.5, "has step=2.5, must be a whole number"),
        ("step", True, "has step=true, must be a whole number"),
        ("step", "3", "has step='3', must be a whole number"),
        ("coef", float("nan"), "has coef=NaN, must be a finite number"),
        ("coef", None, "has coef=null, must be a finite number"),
        ("name", 7, "has name=7, must be text"),
        ("files", ["a"], r"has files=\['a'\], must be an object"),
        ("files", {"a": 1, "b": 10}, r"has files\.b=10, must be a whole number between 1 and 9"),
        ("tags", ["x", None], r"has tags\.1=null, must be text"),
        ("tags", "x", "has tags='x', must be a list, or null"),
        ("on", 1, "has on=1, must be true or false"),
        ("rest", "x" * 1000, r"has rest='x+\.\.\.x+', must be an object, or null"),
    ],
)
def test_a_field_that_holds_something_else_is_named(field, value, message, tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps(GOOD | {field: value}))
    with pytest.raises(ValueError, match=rf"x\.json {message}.*: copy it$"):
        read_json(file, advice="copy it", fields=FIELDS)


def test_a_field_that_is_absent_is_named(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"step": 1}')
    with pytest.raises(ValueError, match=r"x\.json has no field coef, which must be a finite number: copy it"):
        read_json(file, advice="copy it", fields=FIELDS)

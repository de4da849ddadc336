"""A launch leaves the process as it was, also when what it writes beside the run cannot be written."""

import logging
import os

import pytest

from tests.helpers.full_disk import largest_file
from trainer.command import process_state

ELASTIC = logging.getLogger("torch.distributed.elastic")


def test_a_full_disk_neither_hides_the_error_nor_keeps_the_environment(tmp_path, capfd):
    def fail() -> None:
        with process_state.kept({"TORPOR_TEST": "set"}, elastic_log=tmp_path / "elastic.log"):
            assert os.environ["TORPOR_TEST"] == "set"
            ELASTIC.warning("x" * 100)
            raise LookupError("what went wrong")

    before = dict(os.environ), list(ELASTIC.handlers), ELASTIC.propagate
    with largest_file(40), pytest.raises(LookupError, match="what went wrong"):
        fail()
    assert (dict(os.environ), list(ELASTIC.handlers), ELASTIC.propagate) == before
    assert capfd.readouterr().err == ""


def test_nor_does_a_folder_that_is_gone(tmp_path):
    before = dict(os.environ)
    with process_state.kept({"TORPOR_TEST": "set"}, elastic_log=tmp_path / "gone" / "elastic.log"):
        ELASTIC.warning("nobody can read this")
    assert dict(os.environ) == before

"""Fixtures of several modules. Where roles live in this process: a module asks for it with ``pytestmark``."""

from types import SimpleNamespace

import pytest

from tests.helpers.engines import VOCABULARY
from tests.helpers.roles import fresh_saver, one_thread_world
from trainer.tasks.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def world():
    """The world of a worker with one rank and one thread."""
    with one_thread_world():
        yield


@pytest.fixture
def saver(world):
    """No regions of earlier tests' roles."""
    fresh_saver()


@pytest.fixture(scope="module")
def tokenizer():
    """Of bytes alone, for the models of tests.helpers.engines."""
    return load_tokenizer(None, task=SimpleNamespace(corpus=lambda: ["abc"]), vocab_size=VOCABULARY)  # type: ignore[arg-type]

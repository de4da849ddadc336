"""Where roles live in this process; a module asks for it with ``pytestmark``."""

import pytest

from tests.roles import fresh_saver, one_thread_world


@pytest.fixture(scope="module")
def world():
    """The world of a worker with one rank and one thread."""
    with one_thread_world():
        yield


@pytest.fixture
def saver(world):
    """No regions of earlier tests' roles."""
    fresh_saver()

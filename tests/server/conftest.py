"""One server for most tests, one thread for its tiny model."""

import asyncio
from types import SimpleNamespace

import pretend
import pytest
import uvicorn.server
from pretend import torch_threads
from served import Running, running


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    with torch_threads(1):
        yield


@pytest.fixture(autouse=True, scope="module")
def no_time_is_lost():
    """Nothing is compiled or measured in these tests, and servers look ten times as often whether they are to end."""
    sleeps = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)})
    with pytest.MonkeyPatch.context() as patch:
        pretend.no_warm_up(patch)
        patch.setattr(uvicorn.server, "asyncio", sleeps)
        yield


@pytest.fixture(scope="module")
def server() -> Running:
    """For all tests of a file that leave it as it was."""
    with running() as made:
        yield made

"""One server for most tests, one thread for its tiny model."""

import gc

import pretend
import pytest
import torch
from served import Running, running


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def no_warm_up():
    """Nothing is compiled or measured in these tests, and there are many servers."""
    with pytest.MonkeyPatch.context() as patch:
        pretend.no_warm_up(patch)
        yield


@pytest.fixture(scope="module")
def server() -> Running:
    with running() as made:
        yield made
    gc.collect()

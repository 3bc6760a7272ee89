"""Settings for all tests."""

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

from lade.hf import session
from lade.model.support import supports as support
from lade.serving import batch as serving
from lade.testing import nearly_flat_cost
from lade.tuning import cost_file as store

# `.ci/run` asks for the same examples every time; at home each run tries others.
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("home", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "home")


# Whoever starts tests in the background may have them ignore Ctrl-C, and the shell's tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def untouched_generator():
    """No test may depend on the global generator's state, and the library must never draw from it when greedy."""
    torch.manual_seed(1234)
    yield


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory):
    """No test may write into the user's cache folder; all share this one, so that a model is measured only once."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "default_folder", lambda: folder)
        yield folder


@pytest.fixture(autouse=True)
def known_cost(request, monkeypatch):
    """Toy models are not measured, unless a test is about that: what is drafted depends on no clock at first."""
    if "measured_cost" not in request.keywords:
        for module in (session, serving):
            monkeypatch.setattr(module, "step_cost_for", lambda model, runner, batch=1: nearly_flat_cost())


@pytest.fixture(autouse=True)
def trusted(request, monkeypatch):
    """Hooks of tests count passes or break them off; a check of the model, for they are foreign code, would too."""
    if "foreign_code" not in request.keywords:
        monkeypatch.setattr(support, "foreign_code", lambda model: [])

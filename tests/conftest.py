"""Settings for all tests."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# `.ci/run` asks for the same examples every time; at home each run tries others.
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("home", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "home")


@pytest.fixture(autouse=True)
def untouched_generator():
    """No test may depend on the global generator's state, and the library must never draw from it when greedy."""
    torch.manual_seed(1234)
    yield

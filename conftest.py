"""Settings for all tests."""

import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import platformdirs
import pytest
import torch
from hypothesis import HealthCheck, settings
from pretend import cost_of_passes

import lade
from lade import native
from lade.errors import UnsupportedModelError
from lade.hf import refusals
from lade.model import supports as support
from lade.testing import toy_model

pytest_plugins = ["shell_fixtures"]

# oneDNN keeps a compiled product for each shape that it meets, and tests meet thousands: 0.2 GB less in tests/model.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")

# `make test` tries fewer examples than `make test-slow`, see `effort`, and the same ones each time; CI does so in both.
for profile, most, same in (("quick", 25, True), ("thorough", 40, bool(os.environ.get("CI")))):
    settings.register_profile(
        profile,
        max_examples=most,
        deadline=None,
        derandomize=same,  # the default tests pass or fail by what was changed; others look further each time
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("quick")


def pytest_configure(config):
    """Build the compiled kernels if those in the checkout are missing or of other sources; without a compiler go on."""
    if not hasattr(config, "workerinput") and native.library() is None:
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(build, cwd=Path(__file__).parent, check=False)
        native.library.cache_clear()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the cases of a test marked `one_in(k)`, `make test` runs each k-th, and `make test-slow` the others."""
    cases = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None:
            if cases[item.function] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[item.function] += 1


gc.disable()  # until all is imported and collected


def pytest_collection_finish():
    """What was imported and collected stays until the end: no search for garbage has to look through it."""
    gc.collect()
    gc.freeze()
    gc.enable()


KNOWN_PROCESSOR = "AMD EPYC"
"""Where kernels were seen to round rows alike, and int8 to be exact; there a refusal by trial is a failure."""
TRIAL_SAYS = ("beside other tokens", "is not exact on this processor", "has no int8 kernel here")


NO_BFLOAT16 = "no packed bfloat16 kernel here"
"""What packing says where PyTorch multiplies no packed bfloat16: on x86 processors without AVX-512."""
NO_KERNELS = "the compiled kernel"
"""How refusals without the compiled library begin."""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A test may end with a refusal that is the processor's: by PyTorch, or by a trial of ours if `by_processor`.

    Wrong bits fail everywhere, and so does a refusal where PyTorch has the kernel, or where trials are known to pass.
    Where there is no compiler, a test may end because compiled kernels are missing.
    """
    report = (yield).get_result()
    if call.excinfo is None:
        return
    reason = str(call.excinfo.value)
    by_torch = NO_BFLOAT16 in reason and not torch_packs_bfloat16()
    tried = item.get_closest_marker("by_processor") is not None and not on_known_processor()
    by_trial = call.excinfo.errisinstance(UnsupportedModelError) and any(what in reason for what in TRIAL_SAYS)
    by_installation = NO_KERNELS in reason and native.library() is None
    if by_torch or by_installation or (tried and by_trial):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {reason}")


@cache
def torch_packs_bfloat16():
    """Asked of PyTorch itself, so that a refusal of ours cannot hide behind it."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=torch.bfloat16))
    except RuntimeError:
        return False
    return True


@cache
def on_known_processor():
    """Not on the makers' older ones: without VNNI, PyTorch's int8 product saturates, and a trial finds it out."""
    info = Path("/proc/cpuinfo")
    has_vnni = info.is_file() and "avx512_vnni" in info.read_text()
    return has_vnni and native.processor_name().startswith(KNOWN_PROCESSOR)


@pytest.fixture
def known_processor():
    """For tests of what no trial has promised yet."""
    if not on_known_processor():
        pytest.skip(f"what kernels do is known of {KNOWN_PROCESSOR} only")


@pytest.fixture(scope="session")
def rounds_alike():
    """For tests that see no exception: whether models can be invariant here, and in int8."""
    try:
        for dtype in (torch.bfloat16, torch.float32):
            lade.invariant(toy_model(dtype=dtype))
        lade.pack(toy_model(dtype=torch.float32), weights="int8", min_weights=1)
    except UnsupportedModelError as refusal:
        assert native.library() is None or not on_known_processor()
        pytest.skip(str(refusal))


# Whoever starts tests in the background may have them ignore Ctrl-C, and the shell's tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def untouched_generator():
    """No test may depend on the global generator's state, and the library must never draw from it when greedy."""
    torch.manual_seed(1234)
    yield


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    """A fallback is told once per model, and tests share models."""
    monkeypatch.setattr(refusals, "_warned", WeakKeyDictionary())


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory):
    """No test may write into the user's cache folder; all share this one, so that a model is measured only once.

    The processes that tests start find it through their environment, and what others keep beside it where it is.
    """
    own, users = tmp_path_factory.mktemp("cache"), Path(platformdirs.user_cache_dir())
    for kept in users.iterdir() if users.is_dir() else ():
        if kept.name != "lookahead-decoding":
            (own / kept.name).symlink_to(kept)
    folder = own / "lookahead-decoding"
    (folder / "step-cost").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own))
        patch.setattr(platformdirs, "user_cache_dir", lambda *_, **__: str(folder))
        yield folder / "step-cost"


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, where nothing is known yet."""
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *_, **__: str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def known_cost(request, monkeypatch):
    """Toy models are not measured, unless a test is about that: what is drafted depends on no clock at first."""
    if "measured_cost" not in request.keywords:
        cost_of_passes(monkeypatch)


@pytest.fixture(autouse=True)
def trusted(request, monkeypatch):
    """Hooks of tests count passes or break them off; a check of the model, for they are foreign code, would too."""
    if "foreign_code" not in request.keywords:
        monkeypatch.setattr(support, "_foreign_code", lambda facts: [])

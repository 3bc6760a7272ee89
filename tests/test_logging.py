"""What the library writes to the log: slow work that is done once, and why something is decoded plainly."""

import logging
import subprocess
import sys
import warnings

import pytest
import torch

import lade
from lade.backends.trials import tree_check as probe
from lade.model.supports import supports
from lade.testing import toy_model

IDS = torch.tensor([[1, 2, 1, 2]])


@pytest.fixture
def log(caplog):
    """The lines so far: (level, logger, text)."""
    caplog.set_level(logging.DEBUG, "lade")
    return lambda: [(record.levelname, record.name, record.getMessage()) for record in caplog.records]


def of_level(lines, level):
    return [text for name, _, text in lines if name == level]


@pytest.mark.slow
def test_every_logger_is_below_the_packages_and_none_has_a_handler():
    code = (
        "import logging, lade, torch\n"
        "[getattr(lade, name) for name in lade.__all__]\n"
        "names = [name for name in logging.root.manager.loggerDict if name.split('.')[0] == 'lade']\n"
        "assert len(names) > 5 and not any(logging.getLogger(name).handlers for name in ['lade', *names]), names\n"
        "assert all(logging.getLogger(name).level == logging.NOTSET for name in names)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0 and run.stdout == run.stderr == "", run.stderr


@pytest.mark.parametrize("way", ["generate", "stream", "decode", "enable"])
def test_a_fallback_says_why(log, way):
    model, arguments = toy_model(), {"max_new_tokens": 3, "use_cache": False}
    lade.generate(model, IDS, max_new_tokens=10)
    assert of_level(log(), "INFO") == [], "what is served writes nothing"
    calls = {
        "generate": lambda: lade.generate(model, IDS, **arguments),
        "stream": lambda: list(lade.stream(model, IDS, **arguments)),
        "decode": lambda: model.generate(IDS, custom_generate=lade.decode, **arguments),
        "enable": lambda: lade.enable(model).generate(IDS, **arguments),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.FallbackWarning)
        calls[way]()
    (line,) = of_level(log(), "INFO")
    assert line.startswith("running at normal speed: use_cache=False") and log()[-1][1] == "lade.hf.refusals"


@pytest.mark.measured_cost
def test_a_step_cost_that_is_measured(log, own_cache):
    model = toy_model()
    lade.generate(model, IDS, max_new_tokens=5)
    begun, done = of_level(log(), "INFO")
    assert begun.startswith("measuring the step cost of LlamaForCausalLM, batch of 1")
    assert done.startswith("measured the step cost of LlamaForCausalLM, batch of 1: 1 tokens ") and "32 tokens" in done
    lade.generate(toy_model(), IDS, max_new_tokens=5)
    assert len(of_level(log(), "INFO")) == 2, "it was kept"
    assert [line for line in of_level(log(), "DEBUG") if line.startswith("step cost of LlamaForCausalLM, batch of 1")]


def test_an_architecture_that_is_checked(log, monkeypatch):
    model = toy_model()
    monkeypatch.setattr(model.config, "model_type", "unheard_of")
    assert supports(model) and supports(model)
    (line,) = of_level(log(), "INFO")
    assert line.startswith("checking LlamaForCausalLM, which is not a tested architecture")
    assert [name for level, name, _ in log() if level == "DEBUG"] == [probe.__name__]


def test_layers_that_are_packed(log):
    model = torch.nn.Sequential(torch.nn.Linear(512, 512)).eval()
    lade.unpack(lade.pack(model))
    (line,) = of_level(log(), "INFO")
    assert line.startswith("packed 1 layers of Sequential in ")

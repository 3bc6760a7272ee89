"""Options for replicas, and the options of `lade serve` as an application's; Ray itself is for tests/scale."""

import importlib.util
import pickle

import pytest
from test_cli_errors import fails

from lade.cli.serve import options
from lade.errors import ConfigError, InputError
from lade.replicas import app
from lade.server import replicas


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replicas", 0], ["--replicas 0"]),
        (["--max-replicas", 3], ["--max-replicas 3", "--replicas"]),
        (["--replicas", 3, "--max-replicas", 2], ["--max-replicas 2", ">= 3"]),
        (["--replicas", 2, "--memory", "none.memory"], ["none.memory"]),
        (["--replicas", 2, "--log-format", "json"], ["log-format"]),
    ],
)
def test_numbers_that_are_none_are_refused(lade, folder, monkeypatch, arguments, words):
    monkeypatch.setattr(options, "find_spec", lambda name: True)
    fails(lade("serve", "--model", folder, "--port", 0, *arguments), *words)


def test_without_ray_it_tells_what_to_install(lade, folder, monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "ray" else importlib.util.find_spec(name))
    fails(lade("serve", "--model", folder, "--port", 0, "--replicas", 2), "pip install '.[scale]'")


def test_arguments_of_an_application_are_options(monkeypatch, folder):
    monkeypatch.setattr(options, "find_spec", lambda name: True)
    monkeypatch.setattr(replicas, "application", lambda settings, load, scale: (settings, load, scale))
    given = {"model": str(folder), "name": "toy", "replicas": "2", "max_replicas": 4, "max_rows": "3", "page": "false"}
    settings, load, scale = app({**given, "dtype": "float64", "strict": "true"})
    assert (settings.names, settings.max_rows, settings.page, settings.strict) == (("toy",), 3, False, True)
    assert (scale.replicas, scale.most) == (2, 4) and scale.cpus >= 1
    served = pickle.loads(pickle.dumps(load))()  # as it comes to another process
    assert str(served.model.dtype) == "torch.float64" and served.close() is None


@pytest.mark.parametrize(
    ("arguments", "word"), [({"port": "1"}, "--http-port"), ({"nothing": "1"}, "--nothing"), ({"max_rows": "x"}, "x")]
)
def test_arguments_that_are_no_options_are_refused(arguments, word):
    with pytest.raises(InputError, match=word):
        app(arguments)
    with pytest.raises(ConfigError, match="max-rows"):
        app({"max_rows": "0"})

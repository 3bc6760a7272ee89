"""A PEFT adapter that is put into a model."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from lade.cli.loading.hub import Source, find_adapter
from lade.cli.options.model import Loading
from lade.cli.terminal import one_line
from lade.errors import ConfigError


def put_adapter(model: Any, loading: Loading, source: Source) -> None:
    """Put the adapter that was asked for into a model; its weights stay apart, so that it computes what PEFT does.

    Args:
        model: is changed.
        loading: which adapter.
        source: of the model.

    Raises:
        ConfigError, InputError: there is no such adapter, it is none for this model, or PEFT is not installed.
    """
    adapter = loading.adapter
    if find_spec("peft") is None:
        raise ConfigError("adapter", adapter, "it takes PEFT: run  pip install peft")
    where = find_adapter(loading)
    hub = {name: value for name, value in loading.hub.items() if name != "revision"}  # which is the model's
    remedy = "give an adapter's folder, and the --model that it was made for"
    try:
        found = model.load_adapter(where.name, adapter_kwargs={**hub, "local_files_only": where.local})
    except Exception as problem:
        reason = f"it cannot be put into {source.shown!r} ({one_line(problem, 240)})"
        raise ConfigError("adapter", adapter, f"{reason}: {remedy}") from problem
    wrong = sorted([*found.missing_keys, *found.unexpected_keys])
    if wrong:
        reason = f"its weights are not those of an adapter for {source.shown!r} (first {wrong[0]})"
        raise ConfigError("adapter", adapter, f"{reason}: {remedy}")

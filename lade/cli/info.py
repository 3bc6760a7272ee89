"""`lade info`: facts about a model, and whether it is supported."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from lade.cli.options import decoding as options
from lade.cli.terminal import terminal

if TYPE_CHECKING:
    from lade.cli.loading.load import LoadedModel

MAX_TRIED_PARAMETERS = 10**9
"""Largest number of parameters of a model that is checked by running it."""
EXAMPLE = "Example:  [bold]lade info gpt2[/bold]"


@options.grouped
def info(
    model_argument: options.NamedModel = None,
    *,
    loading: options.Loading,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Show whether a model is supported, or why not, its sizes, and versions."""
    with terminal(output) as term:
        from lade.cli.loading.load import load

        facts = _facts(load(loading.with_model(model_argument), term=term))
        if json:
            term.write_json(facts)
            return
        table = Table(show_header=False, box=None)
        for name, value in facts.items():
            style = "" if name != "supported" else "bold green" if value else "bold red"
            table.add_row(Text(name.replace("_", " "), "dim"), Text(_shown(value), style))
        term.out.print(table)


def _facts(loaded: LoadedModel) -> dict[str, Any]:
    import torch
    import transformers

    from lade.model.supports import supports
    from lade.version import __version__

    model = loaded.model
    config = model.config.get_text_config(decoder=True)
    support = supports(model)
    return {
        "model": loaded.name,
        "class": type(model).__name__,
        "model_type": config.model_type,
        "supported": bool(support),
        "reason": support.reason or None,
        "mtp_layers": support.mtp.layers,
        "mtp_bytes": support.mtp.nbytes or None,
        "not_mtp": support.mtp.reason or None,
        "parameters": model.num_parameters(),
        "layers": getattr(config, "num_hidden_layers", None),
        "dtype": loaded.dtype,
        "attention": config._attn_implementation,
        "context": loaded.context,
        "vocabulary": model.get_input_embeddings().num_embeddings,
        "chat_template": bool(getattr(loaded.tokenizer, "chat_template", None)),
        "device": str(model.device),
        **loaded.variant,
        **_packing(model),
        **_invariance(model),
        "threads": torch.get_num_threads(),
        "lade": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _packing(model: Any) -> dict[str, Any]:
    """Return the number of layers that `--pack` packs; they are counted, not packed, which takes seconds."""
    from lade.backends.cpu.packing.pack import int4_layers, int8_layers, packable
    from lade.errors import UnsupportedModelError

    counts = {"int8_layers": int8_layers(model), "int4_layers": int4_layers(model)}
    try:
        return {**counts, "packable_layers": len(packable(model)), "not_packable": None}
    except UnsupportedModelError as problem:
        return {**counts, "packable_layers": 0, "not_packable": problem.reason}


def _invariance(model: Any) -> dict[str, Any]:
    """Return whether `--invariant` supports the model, found by trying it and undoing it.

    Since that takes a few dozen passes, large models are not tried.
    """
    from lade.backends.cpu.invariant.make_invariant import invariant, variant
    from lade.errors import UnsupportedModelError

    if model.num_parameters() > MAX_TRIED_PARAMETERS:
        return {
            "can_be_invariant": None,
            "not_invariant": "not checked for large models: use lade generate --invariant",
        }
    try:
        variant(invariant(model))
    except UnsupportedModelError as problem:
        return {"can_be_invariant": False, "not_invariant": problem.reason}
    return {"can_be_invariant": True, "not_invariant": None}


def _shown(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
    return str(value)

"""`lade info`: facts about a checkpoint, and whether it is supported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from lade.cli.options import decoding as options
from lade.cli.terminal import Terminal, terminal

if TYPE_CHECKING:
    from lade.cli.loading.load import LoadedModel

EXAMPLE = "Example:  [bold]lade info gpt2[/bold]"


@options.grouped
def info(
    model_argument: options.NamedModel = None,
    *,
    loading: options.Loading,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Show whether a model is supported, or why not, and its sizes; `lade doctor` measures it, too."""
    with terminal(output) as term:
        from lade.cli.loading.load import load

        facts = facts_of(load(loading.with_model(model_argument), term=term))
        if json:
            term.write_json(facts)
        else:
            show_facts(facts, term)


def facts_of(loaded: LoadedModel) -> dict[str, Any]:
    """Return facts about a model, by the names that `--json` prints."""
    from lade.model.supports import supports

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
    }


def show_facts(facts: Mapping[str, Any], term: Terminal) -> None:
    """Print facts as a table of two columns."""
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        style = "" if name != "supported" else "bold green" if value else "bold red"
        table.add_row(Text(name.replace("_", " "), "dim"), Text(_shown(value), style))
    term.out.print(table)


def _shown(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.2f}"
    return str(value)

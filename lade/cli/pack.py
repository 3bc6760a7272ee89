"""`lade pack`: round a model to int8 or int4, report the loss, and save it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

import lade
from lade import ConfigError, InputError
from lade.cli.options import decoding as options
from lade.cli.options import option
from lade.cli.options.model import WEIGHTS
from lade.cli.prompts import read_utf8
from lade.cli.terminal import Terminal, count, terminal

if TYPE_CHECKING:
    from lade.cli.loading import LoadedModel

EXAMPLE = "Example:  [bold]lade pack gpt2 --check text.txt --keep lm_head --save ./gpt2-int8[/bold]"
_SHOWN = 8


@dataclass(frozen=True)
class PackOptions:
    """Options of `lade pack`."""

    model_argument: options.NamedModel = None
    check: Path | None = option(None, "FILE", "Text for perplexity before and after, and for the errors of layers.")
    tokens: int = option(4096, "N", "Maximum number of tokens of the text.")
    keep: list[str] | None = option(
        None, "NAME", "Layer that keeps its dtype, such as lm_head or 'layers.0.*'. Repeatable."
    )
    save: Path | None = option(None, "DIR", "Save the packed model to this folder, for --model.")

    def text(self) -> str:
        """Return the text to compare on; empty without `--check`."""
        if self.check is None and self.save is None:
            raise InputError("nothing to do: give --check FILE, --save DIR, or both")
        if self.tokens < 2:
            raise ConfigError("tokens", self.tokens, "give a whole number >= 2")
        return "" if self.check is None else read_utf8(self.check, "text")


@options.grouped
def pack(wanted: PackOptions, *, loading: options.Loading, json: options.Json = False, output: options.Output) -> None:
    """Round a model's weights to int8 or int4 for the CPU, measure the loss in quality, and save the result.

    The result is another, slightly worse model; the change of perplexity says by how much.

    --weights int4 rounds to int4 here. With other commands, --weights rounds while loading.
    """
    with terminal(output) as term:
        text = wanted.text()
        loading = replace(loading.with_model(wanted.model_argument), weights=loading.weights or WEIGHTS[0])
        loading.check()
        from lade.cli.loading import load

        plain = replace(loading, weights=None, device="cpu" if loading.device == "auto" else loading.device)
        loaded = load(plain, term=term)
        if loaded.variant.get("weights"):
            raise InputError(f"model {loaded.name!r} is packed already: give the original")
        ids = [] if wanted.check is None else _encoded(loaded, text, wanted.check, wanted.tokens)
        facts = _packed(loaded, wanted, loading.weights or "", ids, term)
        if json:
            term.write_json(facts)
        else:
            _show(facts, term)


def _listed(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:_SHOWN])} and {more} more"


def _show(facts: dict[str, Any], term: Terminal) -> None:
    errors = facts["errors"]
    kept = f", kept in {facts['dtype']}: {_listed(facts['kept_layers'])}" if facts["kept_layers"] else ""
    lines = [f"{facts['model']}: layers in {facts['weights']}: {facts['int8_layers'] + facts['int4_layers']}{kept}"]
    lines.append(f"{decimal(facts['bytes_before'])} -> {decimal(facts['bytes_after'])}")
    if errors:
        was, now = facts["perplexity_before"], facts["perplexity_after"]
        lines.append(f"perplexity {was:.4g} -> {now:.4g} ({now / was - 1:+.2%}), {facts['tokens']:,} tokens")
    for line in lines:
        term.out.print(Text(line))
    if errors:
        term.out.print(Text(f"relative errors, the largest of {len(errors)}:"))
        worst = sorted(errors, key=lambda error: -error["outputs"])
        table = Table("layer", "weights", "outputs", box=None)
        for error in worst[:_SHOWN]:
            table.add_row(Text(error["name"]), f"{error['weights']:.2%}", f"{error['outputs']:.2%}")
        term.out.print(table)
    if facts["saved"]:
        term.say(f"saved to {facts['saved']}; use it:  lade generate --model {facts['saved']}", "dim")


LONGEST_WINDOW = 1024


def _packed(loaded: LoadedModel, wanted: PackOptions, weights: str, ids: list[int], term: Terminal) -> dict[str, Any]:
    """Pack a model, and save it if asked to; return the fields that `--json` prints."""
    from lade import machine

    window = min(LONGEST_WINDOW, loaded.context or LONGEST_WINDOW)
    found = machine.rounded(loaded.model, weights, keep=wanted.keep or (), ids=ids, window=window, target=wanted.save)
    if wanted.save is not None:
        term.show_status("writing the model")
        lade.save_packed(loaded.model, wanted.save, loaded.tokenizer)
    saved = None if wanted.save is None else str(wanted.save)
    return {"model": loaded.name, "dtype": loaded.dtype, "weights": weights, **found, "saved": saved}


def _encoded(loaded: LoadedModel, text: str, path: Path, tokens: int) -> list[int]:
    """Return the first ids of a text; raises `InputError`, naming its file, for fewer than two."""
    ids: list[int] = loaded.tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"][:tokens]
    if len(ids) < 2:
        raise InputError(f"the text {str(path)!r} has {count(len(ids), 'token')}: give a longer one")
    return ids

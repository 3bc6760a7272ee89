"""`lade pack`: round a model to int8 or int4, report the loss, and save it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
    from lade.backends.cpu.packing.integers import LayerError
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
        facts, errors = _packed(loaded, wanted, loading.weights or "", ids, term)
        if json:
            term.write_json({**facts, "errors": [asdict(error) for error in errors]})
        else:
            _show(facts, errors, term)


def _listed(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:_SHOWN])} and {more} more"


def _show(facts: dict[str, Any], errors: list[LayerError], term: Terminal) -> None:
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
        worst = sorted(errors, key=lambda error: -error.outputs)
        table = Table("layer", "weights", "outputs", box=None)
        for error in worst[:_SHOWN]:
            table.add_row(Text(error.name), f"{error.weights:.2%}", f"{error.outputs:.2%}")
        term.out.print(table)
    if facts["saved"]:
        term.say(f"saved to {facts['saved']}; use it:  lade generate --model {facts['saved']}", "dim")


LONGEST_WINDOW = 1024


def _packed(
    loaded: LoadedModel, wanted: PackOptions, weights: str, ids: list[int], term: Terminal
) -> tuple[dict[str, Any], list[LayerError]]:
    """Pack a model; return the fields that `--json` prints, and the errors of layers on the text of `ids`, if any."""
    from lade.backends.cpu.packing import integers
    from lade.backends.cpu.packing import pack as packing

    model, keep = loaded.model, wanted.keep or ()
    errors: list[LayerError] = []
    facts: dict[str, Any] = {"model": loaded.name, "dtype": loaded.dtype, "weights": weights}
    before, window = _bytes(model), min(LONGEST_WINDOW, loaded.context or LONGEST_WINDOW)
    _check(model, weights, keep, wanted.save)
    if ids:
        term.show_status("reading the text with the model as it is")
        before_packing = integers.perplexity(model, ids, window)
        facts |= {"tokens": len(ids), "window": window, "perplexity_before": before_packing}
    term.show_status("packing the weights")
    packing.pack(model, keep_original=bool(ids), weights=weights, keep=keep)
    if ids:
        term.show_status(f"reading the text in {weights}")
        with integers.watched(model) as errors:
            facts["perplexity_after"] = integers.perplexity(model, ids, window)
    facts |= {"int8_layers": packing.int8_layers(model), "int4_layers": packing.int4_layers(model)}
    facts |= {"kept_layers": packing.kept_layers(model)}
    facts |= {"bytes_before": before, "bytes_after": _bytes(model), "saved": None}
    if wanted.save is not None:
        term.show_status("writing the model")
        lade.save_packed(model, wanted.save, loaded.tokenizer)
        facts["saved"] = str(wanted.save)
    return facts, errors


def _check(model: Any, weights: str, keep: Sequence[str], save: Path | None) -> None:
    """Check what would otherwise fail at the end."""
    from lade.backends.cpu.packing import folder
    from lade.backends.cpu.packing import pack as packing
    from lade.backends.cpu.packing.integers import Int8Linear

    kinds = packing.packable(model, weights=weights, keep=keep)
    small = f"linear layers below {packing.MIN_WEIGHTS:,} weights keep their dtype"
    if not kinds:
        raise InputError(f"nothing to round to {weights}: {small}; give a larger model")
    if not any(issubclass(kind, Int8Linear) for kind in kinds.values()):
        raise ConfigError("keep", ",".join(keep), f"no layer is left to round: {small}")
    if save is not None:
        folder.check_target(save)


def _encoded(loaded: LoadedModel, text: str, path: Path, tokens: int) -> list[int]:
    """Return the first ids of a text; raises `InputError`, naming its file, for fewer than two."""
    ids: list[int] = loaded.tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"][:tokens]
    if len(ids) < 2:
        raise InputError(f"the text {str(path)!r} has {count(len(ids), 'token')}: give a longer one")
    return ids


def _bytes(model: Any) -> int:
    """Return the bytes of all weights, for int8 and int4 layers those of the integers even if the original is kept."""
    from lade.backends.cpu.packing import pack as packing
    from lade.backends.cpu.packing.integers import Int8Linear

    in_integers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    own = {id(module.weight) for module in in_integers} - packing.shared_weights(model)
    dense: int = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in own)
    return dense + sum(module.nbytes for module in in_integers)

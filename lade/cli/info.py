"""`lade info`: facts about a checkpoint; `lade doctor`: whether all is well with it and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

import lade
from lade.cli.options import Checked, Takes, options_in
from lade.cli.options import decoding as options
from lade.cli.terminal import Terminal, terminal

if TYPE_CHECKING:
    from lade.cli.loading import LoadedModel

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
        from lade.cli.loading import load

        facts = facts_of(load(loading.with_model(model_argument), term=term))
        if json:
            term.write_json(facts)
        else:
            show_facts(facts, term)


def facts_of(loaded: LoadedModel) -> dict[str, Any]:
    """Return facts about a model, by the names that `--json` prints."""
    model = loaded.model
    config = model.config.get_text_config(decoder=True)
    support = lade.supports(model)
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
    table = Table("", Column(overflow="fold"), show_header=False, box=None)
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


DOCTOR_EXAMPLE = "Example:  [bold]lade doctor --model gpt2[/bold]"
_CACHED: Takes = (lambda value: 1 <= value <= 10**6, "give a whole number >= 1 and <= 1000000")
_SECONDS: Takes = (lambda value: 0 < value <= 86_400, "give a number > 0 and <= 86400, a day")
_what = options_in("What to measure")


@dataclass(frozen=True)
class DoctorOptions(Checked):
    """Options of `lade doctor`."""

    model_argument: options.NamedModel = None
    cached: int = _what(256, "P", "Tokens in the cache while passes are measured.", takes=_CACHED)
    seconds: float = _what(5.0, "S", "Time limit for measuring passes.", takes=_SECONDS)
    threads: options.Threads = None

    def check(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        super().check()
        options.check_threads(self.threads)


@options.grouped
def doctor(
    wanted: DoctorOptions,
    *,
    loading: options.Loading,
    pack: options.Pack = None,
    invariant: options.Invariant = None,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Check machine, versions and a model, measure its passes, try drafting, and say what to change.

    The times of passes are saved for later generations, which otherwise measure them in about a second.
    """
    with terminal(output) as term:
        wanted.check()
        loading = loading.with_model(wanted.model_argument)
        loading.check()
        loading.check_layout(pack, invariant=invariant)
        from lade.cli import diagnosis
        from lade.cli.loading import load

        term.out.quiet = json
        found: dict[str, Any] = {"machine": diagnosis.machine(), "versions": diagnosis.versions()}
        for part, facts in found.items():
            _show(part, facts, term)
        loaded = load(loading, term=term, pack=pack, invariant=invariant, threads=wanted.threads)
        found["model"] = {**facts_of(loaded), **diagnosis.layout(loaded)}
        _show("model", found["model"], term)
        if found["model"]["supported"]:
            term.say(f"measuring passes: {wanted.seconds:g} s", "dim")
            curve = diagnosis.measured_curve(loaded, wanted.cached, wanted.seconds)
            found["curve"] = curve.as_dict()
            _title(curve.title, term)
            term.out.print(curve.table())
            term.say(f"saved to {curve.saved}" if curve.saved else "not saved", "dim")
            term.say("answering three prompts with and without drafts", "dim")
            found["trial"] = diagnosis.trial(loaded, curve, term)
            _show("trial", found["trial"], term)
        found["advice"] = diagnosis.advice(found)
        _title("what to change", term)
        for line in found["advice"] or ["nothing: all is well"]:
            term.out.print(Text(f"- {line}"))
        if json:
            term.out.quiet = False
            term.write_json(found)


def _title(text: str, term: Terminal) -> None:
    term.out.print(Text(f"\n{text}", "bold"))


def _show(part: str, facts: Mapping[str, Any], term: Terminal) -> None:
    _title(part, term)
    show_facts({name: value for name, value in facts.items() if value is not None}, term)

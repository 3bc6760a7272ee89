"""`lade info`: facts about a checkpoint; `lade doctor`: whether all is well with it and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

import lade
from lade.cli.demo import questions_for
from lade.cli.options import Checked, Takes, options_in
from lade.cli.options import decoding as options
from lade.cli.options.model import Template
from lade.cli.prompts import Prompt
from lade.cli.terminal import Terminal, count, terminal
from lade.version import TESTED_TRANSFORMERS, __version__, minor_version, versions

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
        from lade import machine
        from lade.cli.loading import load

        term.out.quiet = json
        tested = {"tested_transformers": ".".join(map(str, TESTED_TRANSFORMERS))}
        used = {"lade": __version__, **versions(), **tested}
        found: dict[str, Any] = {"machine": machine.hardware(), "versions": used}
        for part, facts in found.items():
            _show(part, facts, term)
        loaded = load(loading, term=term, pack=pack, invariant=invariant, threads=wanted.threads)
        found["model"] = {**facts_of(loaded), **machine.layout(loaded.model, loaded.undone)}
        _show("model", found["model"], term)
        if found["model"]["supported"]:
            term.say(f"measuring passes: {wanted.seconds:g} s", "dim")
            found["curve"] = curve = machine.measured_passes(loaded.model, wanted.cached, wanted.seconds)
            _show_passes(curve, machine.FREE, term)
            term.say("answering three prompts with and without drafts", "dim")
            found["trial"] = trial(loaded, curve["sizes"][0]["median_s"], term)
            _show("trial", found["trial"], term)
        found["advice"] = advice(found)
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


def _show_passes(curve: Mapping[str, Any], free: float, term: Terminal) -> None:
    """Print the times of passes as a table with bars, those of free passes in green."""
    price = f"{count(curve['free_tokens'], 'token')} for the price of one (up to {free:g} times)"
    _title(f"passes over {count(curve['cached'], 'cached token')}: {price}", term)
    table = Table(
        *(Column(name, justify="right") for name in ("tokens", "ms", "relative")), "", box=None, pad_edge=False
    )
    medians = {each["size"]: each["median_s"] for each in curve["sizes"]}
    for size, middle in medians.items():
        bar = "█" * max(1, round(_BAR_WIDTH * middle / max(medians.values())))
        style = "green" if size <= curve["free_tokens"] else "cyan"
        table.add_row(str(size), f"{1e3 * middle:.2f}", f"{middle / medians[1]:.2f}", Text(bar, style))
    term.out.print(table)
    term.say(f"saved to {curve['saved']}" if curve["saved"] else "not saved", "dim")


TRIAL_S = 30.0
LONGEST_ANSWER, SHORTEST_ANSWER, _WARMUP_TOKENS = 96, 24, 8
_BAR_WIDTH = 32
_DEAR, _SHORT_S, _SMALL, _LARGE = 3.0, 0.003, 1.05, 10**8


def trial(loaded: LoadedModel, pass_s: float, term: Terminal) -> dict[str, Any]:
    """Answer three prompts plainly and with drafts, in turn, as short as the time of a pass tells; compare the two."""
    from lade.cli.encoder import Encoder
    from lade.cli.run import Generation, decode

    def answer(prompt: list[int], method: Any, tokens: int) -> Generation:
        run = decode(loaded, prompt, lookahead=method, max_new_tokens=tokens, term=term, on_step=lambda step: None)
        if run.interrupted:
            raise KeyboardInterrupt
        return run

    encoder, plain, drafted = Encoder(loaded, Template()), Generation(), Generation()
    prompts = [encoder(Prompt(text)) for text in questions_for(encoder)]
    longest = int(TRIAL_S / (2 * len(prompts) * pass_s))
    tokens, same = min(LONGEST_ANSWER, max(SHORTEST_ANSWER, longest)), True
    for method in (None, "auto"):  # first calls compile
        answer(prompts[0], method, _WARMUP_TOKENS)
    for prompt in prompts:
        without, with_drafts = answer(prompt, None, tokens), answer(prompt, "auto", tokens)
        same &= without.token_ids == with_drafts.token_ids
        plain.absorb(without)
        drafted.absorb(with_drafts)
    before, after = plain.tokens_per_s, drafted.tokens_per_s
    return {
        "tokens": drafted.stats.new_tokens,
        "tokens_per_step": drafted.stats.tokens_per_step,
        "plain_tokens_per_s": before,
        "tokens_per_s": after,
        "speedup": after / before if before and after else None,
        "same_tokens": same,
        "explanation": drafted.stats.explain(),
    }


def advice(found: Mapping[str, Any]) -> list[str]:
    """Return what to change, most important first, given what `lade doctor --json` prints; empty if all is well."""
    from lade.machine import LACKS_KERNELS

    here, used, model, lines = found["machine"], found["versions"], found["model"], list[str]()
    if here["kernels"] != "compiled":
        lines.append(f"The compiled kernels are {here['kernels']}, {LACKS_KERNELS}.")
    if model["contention"]:
        lines.append(model["contention"])
    if minor_version(used["transformers"]) > TESTED_TRANSFORMERS:
        newer = f"transformers {used['transformers']} is newer than was tested"
        lines.append(f"{newer}: install {used['tested_transformers']}.")
    lines += _advice_on_model(here, model)
    return lines + (_advice_on_speed(found) if "trial" in found else [])


def _advice_on_model(here: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    on_cpu, large = model["device"] == "cpu", model["parameters"] >= _LARGE
    lines = []
    if not model["supported"]:
        lines.append(f"The model is decoded plainly: {model['reason']}. docs/models.md lists what is supported.")
    if on_cpu and here["gpu"]:
        lines.append(f"The model is on the CPU, and there is a GPU ({here['gpu']}): --device cuda.")
    if not on_cpu and not model["captured"]:
        lines.append(f"Passes are launched one kernel at a time: {model['not_captured']}.")
    elif not on_cpu and not model["fused"]:
        lines.append(f"Passes are not fused into few kernels, which takes a third longer: {model['not_fused']}.")
    if on_cpu and large and model["threads"] < here["cores"] and not model["contention"]:
        cores = here["cores"]
        lines.append(f"torch uses {model['threads']} of {cores} cores: OMP_NUM_THREADS={cores} if they idle.")
    if on_cpu and large and model["dtype"] == "float32" and here["bfloat16_products"] != "oneDNN":
        lines.append("In bfloat16 (--dtype bfloat16) passes read half as many bytes; the text may differ.")
    return lines


def _advice_on_speed(found: Mapping[str, Any]) -> list[str]:
    tried, model, times = found["trial"], found["model"], found["curve"]["sizes"]
    one, eight = (next((each["median_s"] for each in times if each["size"] == size), 0.0) for size in (1, 8))
    lines = []
    if not tried["same_tokens"]:
        lines.append("Texts with and without drafts differ, as scores tie in 16 bits: --invariant, or --dtype float32.")
    if eight > _DEAR * one:
        packing = "" if model["packed_layers"] else ": on a CPU try --pack or --weights int8"
        lines.append(f"A pass over 8 tokens takes {eight / one:.1f} times as long as over one{packing}.")
    if one < _SHORT_S:
        lines.append(f"A pass takes {1e3 * one:.1f} ms, of which drafting takes a good part: larger models gain more.")
    if (tried["speedup"] or 0.0) < _SMALL:
        lines.append("Drafts did not pay here. A memory helps if texts resemble each other: lade warm.")
    return lines

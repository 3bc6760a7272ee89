"""`lade bench plan`: what to expect on hardware one does not have yet, with every assumption printed."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from lade.cli.bench.plan_inputs import Wish
from lade.cli.options import decoding as options
from lade.cli.terminal import Terminal, terminal
from lade.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from lade.bench.forecast.forecast import Measured, Prediction
    from lade.bench.forecast.roofline import Roofline

EXAMPLE = "Example:  [bold]lade bench plan --params 7B --device h100-sxm --results results.json --out plan.svg[/bold]"
MOVED = "lade plan is now lade bench plan; the old name will go in a later version"

_FORMATS = (".svg", ".png", ".pdf")
_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def _model(*names: str, metavar: str, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Model")


def _hardware(*names: str, metavar: str, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Hardware")


@options.grouped
def plan(
    params: Annotated[str, _model("--params", metavar="P", help="Parameters, such as 7e9 or 7B.")],
    dtype: Annotated[
        str, _model("--dtype", metavar="NAME", help="Of the weights: bf16, fp16, fp32, fp8, int8, int4.")
    ] = "bf16",
    bandwidth: Annotated[
        str | None, _hardware("--bandwidth", metavar="B", help="Peak bytes per second, such as 3.35e12 or 3.35TB/s.")
    ] = None,
    flops: Annotated[
        str | None,
        _hardware("--flops", metavar="F", help="Peak operations per second, dense, in this dtype: 990e12 or 990T."),
    ] = None,
    device: Annotated[
        str | None,
        _hardware(
            "--device",
            metavar="NAME",
            help="Peaks from a datasheet: a100-80gb, h100-pcie, h100-sxm, h200, l4, l40s.",
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel="Results",
            help="results.json of lade bench: acceptance on your text with your model.",
        ),
    ] = None,
    *,
    layers: Annotated[int | None, _model("--layers", metavar="L", help="With --cached: layers of the model.")] = None,
    kv_heads: Annotated[
        int | None, _model("--kv-heads", metavar="H", help="With --cached: heads with keys and values.")
    ] = None,
    head_dim: Annotated[int | None, _model("--head-dim", metavar="D", help="With --cached: size of a head.")] = None,
    cached: Annotated[int, _model("--cached", metavar="P", help="Tokens in the cache, which every pass reads.")] = 0,
    overhead: Annotated[
        float, _hardware("--overhead", metavar="S", help="Seconds of a pass that overlap with nothing: launches, ...")
    ] = 0.0,
    bandwidth_share: Annotated[
        float | None, _hardware("--bandwidth-share", metavar="X", help="Of the peak, what passes reach. Default 0.8.")
    ] = None,
    flops_share: Annotated[
        float | None, _hardware("--flops-share", metavar="X", help="Of the peak, what passes reach. Default 0.6.")
    ] = None,
    library_time: Annotated[
        float | None,
        _hardware("--library-time", metavar="S", help="Seconds of this library in a step. Default: as measured."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", rich_help_panel="Results", help="Draw cost and acceptance to a .svg, .png or .pdf file."
        ),
    ] = None,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Estimate speeds on hardware you do not have yet: a roofline's cost of a step, times tokens per step measured.

    Nothing is run. All assumptions are printed; the largest is that your text is as predictable as the one measured.
    """
    with terminal(output) as term:
        _check(library_time, out)
        wish = Wish(
            params, dtype, bandwidth, flops, device, layers, kv_heads, head_dim, cached, overhead, bandwidth_share,
            flops_share,
        )  # fmt: skip
        _run(wish, results, library_time, out, term, json=json)


@functools.wraps(plan)
def moved(**values: Any) -> None:
    """Stands in for the command under its old name."""
    typer.secho(f"warning: {MOVED}", err=True, fg=typer.colors.YELLOW)
    plan(**values)


def _run(
    wish: Wish, results: Path | None, library_time: float | None, out: Path | None, term: Terminal, *, json: bool
) -> None:
    from lade.bench.forecast.forecast import SHIPPED, best_sizes, measured_in, predict
    from lade.bench.results import Results

    roofline = wish.roofline()
    measured = SHIPPED if results is None else measured_in(Results.load(results))
    predictions = predict(roofline, measured, library_time)
    best = best_sizes(roofline, measured, library_time)
    assumptions = assumptions_of(wish, roofline, measured, library_time)
    if json:
        term.write_json(_figures(wish, roofline, measured, predictions, best, assumptions))
    else:
        _print(wish, roofline, measured, predictions, best, assumptions, term)
    warning = f"Acceptance was measured elsewhere ({measured.source}); it depends on text and model. "
    remedy = "" if results else "Measure your own with lade bench and give it with --results."
    term.say(Text(warning + remedy, "bold yellow"))
    if out is not None:
        from lade.bench.forecast.figure import draw

        draw(roofline, predictions, f"{wish.params} parameters, {wish.dtype}{_on(wish)}", out)


def assumptions_of(wish: Wish, roofline: Roofline, measured: Measured, library_time: float | None) -> list[str]:
    """Everything that has to hold for the figures to hold, one sentence each."""
    from lade.bench.forecast.roofline import DEVICES

    read = f"weights and the keys and values of {wish.cached} tokens" if wish.cached else "weights; nothing is cached"
    given = [
        f"A pass reads {_si(roofline.weight_bytes + roofline.cache_bytes)}B ({read}) at {roofline.bandwidth_share:g} "
        f"of {_si(roofline.bandwidth)}B/s, and computes 2 operations per parameter and token at "
        f"{roofline.flops_share:g} of {_si(roofline.flops)}FLOPS; the slower of the two decides.",
        f"The shares {roofline.bandwidth_share:g} and {roofline.flops_share:g} of the peaks are assumed, not measured.",
        f"{1e3 * roofline.overhead_s:g} ms of each pass overlap with nothing (--overhead); launching kernels, where it "
        "is not hidden, belongs there.",
    ]
    if wish.device is not None:
        given.append(f"Peaks of {wish.device}: {DEVICES[wish.device].source}, where not given.")
    own = f"as long as {measured.own_source}" if library_time is None else f"{1e3 * library_time:g} ms, as given"
    return [
        *given,
        f"Outside the forward pass a step takes {own} (plain: {1e3 * measured.plain_own_s:.2f} ms), on the CPU that "
        "drives the hardware; none of it overlaps with the pass.",
        "Attention's own arithmetic, activations, sampling and prefill are left out; weights and cache fit into the "
        "memory; one text at a time.",
        f"Tokens per step are those of: {measured.source}.",
        "Best sizes: between measured ones S is straight over log2 of the tokens fed; beyond them nothing is assumed.",
    ]


def _figures(
    wish: Wish,
    roofline: Roofline,
    measured: Measured,
    predictions: list[Prediction],
    best: list[Prediction],
    assumptions: list[str],
) -> dict[str, Any]:
    """What `--json` says."""
    plain_s = roofline.seconds(1) + measured.plain_own_s
    curve = [{"size": size, "seconds": roofline.seconds(size), "relative": roofline.relative(size)} for size in _SIZES]
    return {
        "roofline": {**asdict(roofline), "device": wish.device, "cached": wish.cached},
        "one_token_s": roofline.seconds(1),
        "ridge_tokens": roofline.ridge,
        "free_tokens": roofline.free,
        "curve": curve,
        "plain": {"step_s": plain_s, "tokens_per_s": 1 / plain_s},
        "methods": [asdict(each) for each in predictions],
        "best": [asdict(each) for each in best],
        "left_out": [{"method": name, "reason": reason} for name, reason in measured.left_out],
        "source": measured.source,
        "assumptions": assumptions,
    }


def _print(
    wish: Wish,
    roofline: Roofline,
    measured: Measured,
    predictions: list[Prediction],
    best: list[Prediction],
    assumptions: list[str],
    term: Terminal,
) -> None:
    from lade.bench.forecast.roofline import FREE
    from lade.bench.report.prose import count

    plain_s = roofline.seconds(1) + measured.plain_own_s
    term.out.print(Text(f"A pass of {wish.params} parameters in {roofline.dtype}{_on(wish)}", "bold"))
    term.out.print(_curve(roofline))
    term.out.print(
        f"{count(roofline.free, 'token')} for the price of one (up to {FREE:g} times its time); "
        f"computing takes longer than reading from {max(1.0, roofline.ridge):.0f} tokens on\n"
    )
    term.out.print(Text(f"Decoding, against {1 / plain_s:.1f} tokens a second with plain decoding", "bold"))
    term.out.print(_table([*predictions, *best], first_best=len(predictions)))
    for name, reason in measured.left_out:
        term.out.print(Text(f"{name}: left out, {reason}", "dim"))
    term.out.print(Text("\nAssumptions", "bold"))
    for line in assumptions:
        term.out.print(Text(f"- {line}"))


def _curve(roofline: Roofline) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("tokens fed", "ms", "t(S)/t(1)"):
        table.add_column(name, justify="right")
    table.add_column("limited by")
    for size in _SIZES:
        limit = "reading" if size <= roofline.ridge else "computing"
        table.add_row(str(size), f"{1e3 * roofline.seconds(size):.2f}", f"{roofline.relative(size):.2f}", limit)
    return table


def _table(predictions: list[Prediction], first_best: int) -> Table:
    several = len({each.workload for each in predictions}) > 1
    table = Table(box=None, pad_edge=False)
    table.add_column("method", overflow="fold")
    for name in ("fed", "S", "step, ms", "speed-up", "tokens/s", "even at"):
        table.add_column(name, justify="right")
    for number, each in enumerate(predictions):
        table.add_row(
            Text(f"{each.workload}: {each.name}" if several else each.name, "bold" if number >= first_best else ""),
            f"{each.fed:.1f}",
            f"{each.tokens_per_step:.2f}",
            f"{1e3 * each.step_s:.2f}",
            Text(f"{each.speedup:.2f}", "green" if each.speedup > 1.0 else "red" if each.speedup < 1.0 else ""),
            f"{each.tokens_per_s:.1f}",
            f"{each.break_even:.0f}",
        )
    table.caption = "S: tokens per step. Even at: a step yielding as many and feeding more would be slower than plain."
    table.caption_justify = "left"
    return table


def _on(wish: Wish) -> str:
    return f" on {wish.device}" if wish.device else ""


def _si(value: float) -> str:
    """With a prefix, up to its unit: 3.35e12 is "3.35 T"."""
    power = min(5, max(0, int(math.log10(value) // 3))) if value >= 1 else 0
    return f"{value / 10 ** (3 * power):.4g} {['', 'k', 'M', 'G', 'T', 'P'][power]}"


def _check(library_time: float | None, out: Path | None) -> None:
    """Find out before the work begins what would end it."""
    if library_time is not None and not 0.0 <= library_time < math.inf:
        raise ConfigError("library-time", library_time, "give seconds >= 0")
    if out is None:
        return
    if out.suffix.lower() not in _FORMATS:
        raise ConfigError("out", str(out), f"give a name that ends in {', '.join(_FORMATS)}")
    if out.is_dir():
        raise ConfigError("out", str(out), "it is a folder: give the name of a file")
    if not out.absolute().parent.is_dir():
        raise ConfigError("out", str(out), f"the folder {out.absolute().parent} does not exist: create it")
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "bench")

"""`lade plan`: forecast for other hardware, with all assumptions printed."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from lade.cli.options import decoding as options
from lade.cli.options.grouping import check_picture, in_panel
from lade.cli.terminal import Terminal, terminal
from lade.errors import ConfigError
from lade_lab.roofline import (
    BANDWIDTH_SHARE,
    BYTES,
    DEVICES,
    FLOPS_SHARE,
    FREE,
    INTERCONNECTS,
    MESSAGE_S,
    PARTS,
    READOUT_BYTES,
    Roofline,
    Sharing,
    cache_bytes_of,
)

if TYPE_CHECKING:
    from lade_lab.forecast import Measured, Prediction
    from lade_lab.roofline import Roofline


_MOST = 10**12
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15}
_UNITS = {"params": "", "bandwidth": "b/s", "flops": "flops|flop/s|flops/s"}
_SUCH_AS = {"params": "7e9, 7B or 500M", "bandwidth": "3.35e12 or 900GB/s", "flops": "990e12 or 990T"}
_QUANTITY = r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)\s*([kmgbtp]?)(?:{unit})?"


_model, _hardware = in_panel("Model"), in_panel("Hardware")


@dataclass(frozen=True)
class HardwareSpec:
    """The model and the hardware to estimate, as the command line has them.

    Attributes:
        params, dtype: of the model.
        bandwidth, flops: of the hardware; None: of the device.
        device: name of a known one.
        layers, kv_heads, head_dim, cached: what a cache of keys and values needs; `cached` 0: there is none.
        devices, interconnect: how many decode together, and what is between them.
        overhead: seconds of each pass.
        bandwidth_share, flops_share: of the peaks, what passes reach.
    """

    params: Annotated[str, _model(metavar="P", help="Parameters, such as 7e9 or 7B.")]
    dtype: Annotated[str, _model(metavar="NAME", help="Weight dtype: bf16, fp16, fp32, fp8, int8, int4.")] = "bf16"
    bandwidth: Annotated[
        str | None, _hardware(metavar="B", help="Peak bytes per second, such as 3.35e12 or 3.35TB/s.")
    ] = None
    flops: Annotated[
        str | None, _hardware(metavar="F", help="Peak operations per second, dense, in this dtype: 990e12 or 990T.")
    ] = None
    device: Annotated[
        str | None,
        _hardware(metavar="NAME", help="Peaks from a datasheet: a100-80gb, h100-pcie, h100-sxm, h200, l4, l40s."),
    ] = None
    layers: Annotated[int | None, _model(metavar="L", help="With --cached: layers of the model.")] = None
    kv_heads: Annotated[int | None, _model(metavar="H", help="With --cached: key-value heads.")] = None
    head_dim: Annotated[int | None, _model(metavar="D", help="With --cached: size of a head.")] = None
    cached: Annotated[int, _model(metavar="P", help="Tokens in the cache, which every pass reads.")] = 0
    devices: Annotated[
        int,
        _hardware(metavar="P", help="Number of devices that decode one text together: 1, 2, 4 or 8. Needs --layers."),
    ] = 1
    interconnect: Annotated[str, _hardware(metavar="NAME", help="Link between the devices: nvlink or pcie.")] = "nvlink"
    overhead: Annotated[
        float, _hardware(metavar="S", help="Seconds per pass that overlap with nothing, such as kernel launches.")
    ] = 0.0
    bandwidth_share: Annotated[
        float,
        _hardware(metavar="X", show_default=False, help="Share of the peak bandwidth that passes reach. Default: 0.8."),
    ] = BANDWIDTH_SHARE
    flops_share: Annotated[
        float,
        _hardware(
            metavar="X", show_default=False, help="Share of the peak operations that passes reach. Default: 0.6."
        ),
    ] = FLOPS_SHARE

    def roofline(self) -> Roofline:
        """The cost of its steps.

        Raises:
            ConfigError: a value is out of range or missing.
        """
        params, (bandwidth, flops) = quantity("params", self.params), self._peaks()
        cache_bytes, shares = self._cache_bytes(), (self.bandwidth_share, self.flops_share)
        try:
            return Roofline(params, self.dtype, bandwidth, flops, cache_bytes, self.overhead, *shares)
        except ConfigError as problem:  # its fields are spelt otherwise than the options
            name = problem.field.removesuffix("_s").replace("_", "-")
            raise ConfigError(name, problem.value, problem.remedy) from problem

    def sharing(self) -> Sharing | None:
        """The devices that decode together; None for a single one.

        Raises:
            ConfigError: a value is not known, or missing.
        """
        if self.devices == 1:
            return None
        if self.devices not in PARTS:
            raise ConfigError("devices", self.devices, f"give 1, or one of {', '.join(map(str, PARTS))}")
        if self.interconnect not in INTERCONNECTS:
            raise ConfigError("interconnect", self.interconnect, f"give one of {', '.join(INTERCONNECTS)}")
        if self.layers is None:
            raise ConfigError("devices", self.devices, "give --layers too: they say how often devices exchange results")
        return Sharing(self.devices, INTERCONNECTS[self.interconnect], self.layers)

    def _peaks(self) -> tuple[float, float]:
        """Bandwidth and operations per second: as given, or of the device."""
        if self.device is not None and self.device not in DEVICES:
            raise ConfigError("device", self.device, f"give one of {', '.join(DEVICES)}, or --bandwidth and --flops")
        known = DEVICES[self.device] if self.device is not None else None
        bandwidth = quantity("bandwidth", self.bandwidth) if self.bandwidth is not None else None
        flops = quantity("flops", self.flops) if self.flops is not None else None
        if known is not None and flops is None and BYTES.get(self.dtype, 2.0) != 2.0:
            remedy = f"the figure known for {self.device} is for 16 bits: give that for {self.dtype}"
            raise ConfigError("flops", None, remedy)
        for name, value in (("bandwidth", bandwidth), ("flops", flops)):
            if value is None and known is None:
                raise ConfigError(name, None, f"give a number such as {_SUCH_AS[name]}, or a device with --device")
        assert known is not None or (bandwidth is not None and flops is not None)
        return bandwidth or known.bandwidth, flops or known.flops  # type: ignore[union-attr]

    def _cache_bytes(self) -> float:
        sizes = {"layers": self.layers, "kv-heads": self.kv_heads, "head-dim": self.head_dim}
        for name, value in {**sizes, "cached": self.cached or None}.items():
            if value is not None and not 1 <= value <= _MOST:
                raise ConfigError(name, value, f"give a whole number >= 1 and <= {_MOST}")
        missing = [name for name, value in sizes.items() if value is None]
        if self.cached and missing:
            needed = " ".join(f"--{name}" for name in missing)
            raise ConfigError("cached", self.cached, f"give {needed} too: they say how large its keys and values are")
        unused = sizes.keys() - missing - ({"layers"} if self.devices > 1 else set())
        if not self.cached and unused:
            raise ConfigError("cached", self.cached, f"without cached tokens nothing uses --{min(unused)}")
        if not self.cached or self.dtype not in BYTES:  # a dtype unknown is refused with all the rest
            return 0.0
        assert self.layers is not None and self.kv_heads is not None and self.head_dim is not None
        return cache_bytes_of(self.dtype, self.cached, self.layers, self.kv_heads, self.head_dim)


def quantity(name: str, text: str) -> float:
    """A number as people write it: 7e9, 7B, 500M, 3.35TB/s, 990 TFLOPS.

    Args:
        name: params, bandwidth or flops; it decides which unit may follow.
        text: as given.

    Raises:
        ConfigError: it is no number > 0.
    """
    found = re.fullmatch(_QUANTITY.format(unit=_UNITS[name]), text.strip().lower(), re.ASCII)
    value = float(found[1]) * _PREFIXES[found[2]] if found else math.nan
    if not 0.0 < value < math.inf:
        raise ConfigError(name, text, f"give a number > 0, such as {_SUCH_AS[name]}")
    return value


EXAMPLE = "Example:  [bold]lade plan --params 7B --device h100-sxm --results results.json --out plan.svg[/bold]"

_results = in_panel("Results")
_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@options.grouped
def plan(
    hardware: HardwareSpec,
    *,
    results: Annotated[
        Path | None,
        _results(metavar="FILE", help="results.json of lade bench: acceptance on your text with your model."),
    ] = None,
    library_time: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            rich_help_panel="Hardware",
            help="Seconds per step outside of the passes. Default: as measured.",
        ),
    ] = None,
    out: Annotated[
        Path | None, _results(metavar="FILE", help="Draw cost and acceptance to a .svg, .png or .pdf file.")
    ] = None,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Estimate speeds on hardware you do not have, from a roofline model and measured tokens per step.

    Nothing is run. All assumptions are printed; the main one is that your text is as predictable as the one measured.
    """
    with terminal(output) as term:
        if library_time is not None and not 0.0 <= library_time < math.inf:
            raise ConfigError("library-time", library_time, "give seconds >= 0")
        if out is not None:
            check_picture(out)
        forecast = Forecast.of(hardware, results, library_time)
        if json:
            term.write_json(forecast.as_dict())
        else:
            _print(forecast, term)
        warning = f"Acceptance was measured elsewhere ({forecast.measured.source}); it depends on text and model. "
        remedy = "" if results else "Measure your own with lade bench and give it with --results."
        term.say(Text(warning + remedy, "bold yellow"))
        if out is not None:
            from lade_lab.forecast import draw

            draw(forecast.roofline, forecast.predictions, f"{hardware.params} parameters, {_named(hardware)}", out)


@dataclass(frozen=True)
class Forecast:
    """Forecast for a model on given hardware.

    Attributes:
        hardware: as on the command line.
        roofline: the cost of its steps.
        measured: acceptance and the library's own time.
        library_time: seconds of the library in a step; None: as measured.
        predictions: of the methods measured.
        best: the best sizes of each kind of method.
        shared: the same on several devices, in each way to share the work; none on a single one.
    """

    hardware: HardwareSpec
    roofline: Roofline
    measured: Measured
    library_time: float | None
    predictions: list[Prediction]
    best: list[Prediction]
    shared: list[Prediction]

    @classmethod
    def of(cls, hardware: HardwareSpec, results: Path | None, library_time: float | None) -> Forecast:
        """Forecast from a results.json, or from what the project has measured."""
        from lade_lab.forecast import SHIPPED, best_sizes, measured_in, predict
        from lade_lab.results import Results

        roofline = hardware.roofline()
        measured = SHIPPED if results is None else measured_in(Results.load(results))
        given, sharing = (roofline, measured, library_time), hardware.sharing()
        shared: list[Prediction] = []
        if sharing is not None:
            for name, pass_s in (("tensor", sharing.tensor_parallel_s), ("lookahead", sharing.lookahead_parallel_s)):
                where = f", {name} parallel over {sharing.devices}"
                shared += best_sizes(*given, functools.partial(pass_s, roofline), where)
        return cls(hardware, *given, predict(*given), best_sizes(*given), shared)

    @property
    def plain_s(self) -> float:
        """Seconds of a step of plain decoding."""
        return self.roofline.seconds(1) + self.measured.plain_own_s

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast as `--json` prints it."""
        roofline = self.roofline
        curve = [
            {"size": size, "seconds": roofline.seconds(size), "relative": roofline.relative(size)} for size in _SIZES
        ]
        return {
            "roofline": {**asdict(roofline), "device": self.hardware.device, "cached": self.hardware.cached},
            "one_token_s": roofline.seconds(1),
            "ridge_tokens": roofline.ridge,
            "free_tokens": roofline.free,
            "curve": curve,
            "plain": {"step_s": self.plain_s, "tokens_per_s": 1 / self.plain_s},
            "methods": [asdict(each) for each in self.predictions],
            "best": [asdict(each) for each in self.best],
            "shared": [asdict(each) for each in self.shared],
            "left_out": [{"method": name, "reason": reason} for name, reason in self.measured.left_out],
            "source": self.measured.source,
            "assumptions": assumptions_of(self),
        }


def assumptions_of(found: Forecast) -> list[str]:
    """Everything that has to hold for the figures to hold, one sentence each."""
    hardware, roofline, measured = found.hardware, found.roofline, found.measured
    read = (
        f"weights and the keys and values of {hardware.cached} tokens"
        if hardware.cached
        else "weights; nothing is cached"
    )
    given = [
        f"A pass reads {_si(roofline.weight_bytes + roofline.cache_bytes)}B ({read}) at {roofline.bandwidth_share:g} "
        f"of {_si(roofline.bandwidth)}B/s, and computes 2 operations per parameter and token at "
        f"{roofline.flops_share:g} of {_si(roofline.flops)}FLOPS; the slower of the two decides.",
        f"The shares {roofline.bandwidth_share:g} and {roofline.flops_share:g} of the peaks are assumed, not measured.",
        f"{1e3 * roofline.overhead_s:g} ms of each pass overlap with nothing (--overhead); launching kernels, where it "
        "is not hidden, belongs there.",
    ]
    if hardware.device is not None:
        given.append(f"Peaks of {hardware.device}: {DEVICES[hardware.device].source}, where not given.")
    if (sharing := hardware.sharing()) is not None:
        given += assumptions_of_sharing(sharing, hardware.interconnect)
    own = (
        f"as long as {measured.own_source}"
        if found.library_time is None
        else f"{1e3 * found.library_time:g} ms, as given"
    )
    return [
        *given,
        f"Outside the forward pass a step takes {own} (plain: {1e3 * measured.plain_own_s:.2f} ms), on the CPU that "
        "drives the hardware; none of it overlaps with the pass.",
        "Attention's own arithmetic, activations, sampling and prefill are left out; weights and cache fit into the "
        "memory; one text at a time.",
        f"Tokens per step are those of: {measured.source}.",
        "Best sizes: between measured ones S is straight over log2 of the tokens fed; beyond them nothing is assumed.",
    ]


def assumptions_of_sharing(sharing: Sharing, interconnect: str) -> list[str]:
    """Return the assumptions on several devices; none was measured."""
    link, sizes = sharing.interconnect, ", ".join(f"{part:g} of {fed:g}" for fed, part in PARTS[sharing.devices])
    return [
        f"Exchanges over {interconnect} take {1e6 * link.latency_s:g} us and {_si(link.bandwidth)}B/s; announcing a "
        f"pass takes {1e6 * MESSAGE_S:g} us. Assumed, not measured.",
        f"Tensor parallel: {sharing.devices} devices take a share of the pass each, with two exchanges a layer; a "
        "layer has 12 times the square of its width in parameters.",
        f"Lookahead parallel: the largest part of a tree is {sizes} tokens; {READOUT_BYTES} bytes of each go to the "
        "first device, as in greedy decoding. Where tokens are drawn, whole rows of logits do.",
    ]


def _print(found: Forecast, term: Terminal) -> None:
    from lade.cli.terminal import count

    roofline, measured = found.roofline, found.measured
    term.out.print(Text(f"A pass of {found.hardware.params} parameters in {_named(found.hardware)}", "bold"))
    term.out.print(_curve(roofline))
    term.out.print(
        f"{count(roofline.free, 'token')} for the price of one (up to {FREE:g} times its time); "
        f"computing takes longer than reading from {max(1.0, roofline.ridge):.0f} tokens on\n"
    )
    term.out.print(Text(f"Decoding, against {1 / found.plain_s:.1f} tokens a second with plain decoding", "bold"))
    term.out.print(_table([*found.predictions, *found.best, *found.shared], first_best=len(found.predictions)))
    for name, reason in measured.left_out:
        term.out.print(Text(f"{name}: left out, {reason}", "dim"))
    term.out.print(Text("\nAssumptions", "bold"))
    for line in assumptions_of(found):
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


def _named(hardware: HardwareSpec) -> str:
    return f"{hardware.dtype}{f' on {hardware.device}' if hardware.device else ''}"


def _si(value: float) -> str:
    """With a prefix, up to its unit: 3.35e12 is "3.35 T"."""
    power = min(5, max(0, int(math.log10(value) // 3))) if value >= 1 else 0
    return f"{value / 10 ** (3 * power):.4g} {['', 'k', 'M', 'G', 'T', 'P'][power]}"

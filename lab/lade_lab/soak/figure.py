"""A soak as a picture: memory, descriptors and threads, and latency of the probe by time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lade_lab.report.theme import LIGHT
from lade_lab.soak.verdict import Sample, slope, warm

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(samples: Sequence[Sample]) -> Figure:
    """The picture; to be called under `report.theme.RC`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.4), layout="constrained")
    memory, counts, latency = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    minutes = [each["minute"] for each in samples]
    memory.plot(minutes, [each["rss_mb"] for each in samples], color=LIGHT.gain, marker=".", lw=1.2)
    memory.set_ylabel("RSS, MB")
    kept = warm(samples)
    if len(kept) > 1:
        memory.axvline(kept[0]["minute"], color=LIGHT.soft, ls=":")
        text = f"{slope(kept, 'rss_mb'):+.2f} MB a minute from here on"
        memory.text(kept[0]["minute"] + minutes[-1] / 100, 20, text)
    for name, color in zip(("descriptors", "threads"), LIGHT.lines, strict=False):
        counts.plot(minutes, [each[name] for each in samples], color=color, marker=".", lw=1.2, label=name)
    counts.legend(frameon=False, ncols=2, loc="lower right")
    for name, label, color in (
        ("probe_ms", "time", LIGHT.lines[0]),
        ("probe_processor_ms", "processor", LIGHT.lines[1]),
    ):
        latency.plot(minutes, [each[name] for each in samples], color=color, marker=".", lw=1.2, label=label)
    latency.set_ylabel("probe, ms")
    latency.set_xlabel(f"minutes; {samples[-1]['requests']:,} requests")
    latency.legend(frameon=False, ncols=2, loc="upper left")
    for axes in (memory, counts, latency):
        _dress(axes)
    return figure


def _dress(axes: Axes) -> None:
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.grid(axis="y", alpha=0.4)

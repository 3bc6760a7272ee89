"""The pictures in the report, drawn twice where width matters: for a desk and for a phone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from lade.bench.analysis.cost_benefit import Point
from lade.bench.analysis.curve import Curve
from lade.bench.analysis.summary import Row, Summary
from lade.bench.report.labels import around, place
from lade.bench.report.prose import LOSS, is_loss, workload_name
from lade.bench.report.svg import Drawing, Scale, fitted

RATIOS = (1, 2, 0.5, 4, 0.25, 8, 0.1, 16, 1.5, 0.67, 3, 6, 12, 0.8, 1.25, 0.33)  # the roundest first
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
NARROW = 340
_LABEL = 12  # size of the font


def both(draw: Callable[[float], Drawing], wide: float, narrow: float = NARROW) -> Markup:
    """A drawing for wide pages and one for narrow ones; the style sheet shows one of them."""
    return draw(wide).markup("chart wide") + draw(narrow).markup("chart narrow")


def speed_bars(summary: Summary) -> Markup:
    """Speed-up by workload and method, from the line at 1: to the right gains, to the left losses."""
    return both(lambda width: _bars(summary, width), 760)


def _bars(summary: Summary, width: float) -> Drawing:
    groups = [
        (workload_name(block), [r for r in block.rows if r.method != summary.reference]) for block in summary.blocks
    ]
    drawing = Drawing(width, 34 + sum(30 + 22 * len(rows) for _, rows in groups), _bars_label(summary))
    name_room = 128 if width == NARROW else 190
    spreads = [row.speedup.each for _, rows in groups for row in rows if row.speedup]
    low, high = min([0.9, *(each.low for each in spreads)]), max([1.1, *(each.high for each in spreads)])
    scale = Scale(low / 1.03, high * 1.03, name_room, width - 54, logarithmic=True)
    bottom = drawing.height - 24
    for tick in scale.ticks(RATIOS, apart=30):
        drawing.line(scale(tick), 6, scale(tick), bottom, "one" if tick == 1 else "grid")
        drawing.text(scale(tick), bottom + 16, f"{tick:g}", "tick", "middle")
    y = 0.0
    for name, rows in groups:
        drawing.text(0, y + 20, fitted(name, name_room), "group", title=name)
        y += 30
        for row in rows:
            _bar(drawing, row, scale, y, name_room)
            y += 22
    return drawing


def _bar(drawing: Drawing, row: Row, scale: Scale, y: float, name_room: float) -> None:
    drawing.text(0, y + 14, fitted(row.method, name_room - 6), "name", title=row.method)
    if row.speedup is None:
        drawing.text(drawing.width, y + 14, "not measured", "tick", "end")
        return
    each = row.speedup.each
    kind = "loss" if is_loss(each.median) else "gain"
    start, end = sorted((scale(1), scale(each.median)))
    half = f"{row.method}: {each.median:.2f}, middle half {each.low:.2f} to {each.high:.2f}, {each.count} answers"
    drawing.box(start, y + 4, max(end - start, 1), 12, kind, half)
    drawing.line(scale(each.low), y + 10, scale(each.high), y + 10, "spread")
    for edge in (each.low, each.high):
        drawing.line(scale(edge), y + 6, scale(edge), y + 14, "spread")
    value = f"{LOSS} {each.median:.2f}" if kind == "loss" else f"{each.median:.2f}"
    drawing.text(drawing.width, y + 14, value, f"value {kind}", "end")


def _bars_label(summary: Summary) -> str:
    rows = [row for row in summary.overall.rows if row.speedup and row.method != summary.reference]
    speeds = ", ".join(f"{row.method} {row.speedup.each.median:.2f}" for row in rows if row.speedup)
    return f"Bars: speed-up over {summary.reference}, median over answers. Over all: {speeds}."


def trade(points: Sequence[Point]) -> Markup:
    """Tokens per step against tokens fed per step, each with the tokens per step at which it breaks even."""
    return both(lambda width: _trade(points, width), 480)


def _trade(points: Sequence[Point], width: float) -> Drawing:
    drawing = Drawing(width, 320, _trade_label(points))
    highest = max([2.0, *(each.gained for each in points), *(each.even or 0.0 for each in points)])
    x = Scale(1, max([2.0, *(each.fed for each in points)]) * 1.5, 34, width - 8, logarithmic=True)
    y = Scale(0.8, highest * 1.12, 272, 8)
    _axes(drawing, x, y, "tokens fed per step", "tokens per step")
    taken = [(x.start, y(1) - 2, x.end, y(1) + 2), *(around(x(each.fed), y(each.gained), 7) for each in points)]
    for each in points:
        if each.even is not None:
            left, level = x(each.fed), y(each.even)
            drawing.line(left, level, left, y(each.gained), f"reach {each.kind}")
            drawing.line(left - 9, level, left + 9, level, "due")
            taken.append((left - 9, min(level, y(each.gained)) - 2, left + 9, max(level, y(each.gained)) + 2))
    for each in points:
        _mark(drawing, x(each.fed), y(each.gained), each.kind, _trade_title(each))
        name = fitted(each.name, 0.7 * width)
        spot = place(name, x(each.fed), y(each.gained), _LABEL, taken, (30, 0, width, y.start))
        drawing.text(x(each.fed) + spot.dx, y(each.gained) + spot.dy, name, "name", spot.anchor)
    return drawing


def _trade_title(each: Point) -> str:
    due = "" if each.even is None else f", {each.even:.2f} break even"
    return f"{each.name}: {each.gained:.2f} tokens per step for {each.fed:.1f} fed{due}"


def _trade_label(points: Sequence[Point]) -> str:
    return f"Tokens per step against tokens fed per step. {'; '.join(map(_trade_title, points))}."


def _mark(drawing: Drawing, x: float, y: float, kind: str, title: str) -> None:
    """A dot; a loss is a triangle that points down."""
    if kind == "loss":
        drawing.path([(x - 6, y - 5), (x + 6, y - 5), (x, y + 6)], kind, title, close=True)
    else:
        drawing.dot(x, y, kind, title)


def step_curves(curves: Sequence[Curve]) -> Markup:
    """What a pass takes by the tokens it feeds, relative to one over a single token."""
    return both(lambda width: _step_curves(curves, width), 480)


def _step_curves(curves: Sequence[Curve], width: float) -> Drawing:
    ends = ", ".join(f"{each.relative(each.sizes[-1]):.2f} times at {each.sizes[-1]}" for each in curves)
    drawing = Drawing(width, 320, f"Time of a step relative to one over a single token: {ends} tokens.")
    x = Scale(1, max(each.sizes[-1] for each in curves), 34, width - 8, logarithmic=True)
    y = Scale(0, max(spread.high for each in curves for spread in each.relative_spreads) * 1.05, 272, 8)
    _axes(drawing, x, y, "tokens fed", "time, one token = 1")
    for number, curve in enumerate(curves):
        spreads = list(zip(curve.sizes, curve.relative_spreads, strict=True))
        band = [(x(size), y(spread.high)) for size, spread in spreads]
        band += [(x(size), y(spread.low)) for size, spread in reversed(spreads)]
        drawing.path(band, f"band band-{number}", close=True)
        drawing.path([(x(size), y(spread.median)) for size, spread in spreads], f"line line-{number}")
    return drawing


def _axes(drawing: Drawing, x: Scale, y: Scale, below: str, beside: str) -> None:
    whole = [float(value) for value in range(21)]
    for value in y.ticks([1, *whole, *(each + 0.5 for each in whole)], apart=26, keep=[1]):
        drawing.line(x.start, y(value), x.end, y(value), "one" if value == 1 else "grid")
        drawing.text(x.start - 6, y(value) + 4, f"{value:g}", "tick", "end")
    for value in x.ticks(SIZES, apart=26):
        drawing.text(x(value), y.start + 16, f"{value:g}", "tick", "middle")
    drawing.text(x.end, y.start + 38, below, "axis", "end")
    drawing.text(x.start + 4, 16, beside, "axis")


def acceptance_columns(places: Sequence[dict[str, float]], columns: int) -> Markup:
    """For each place in a step, the share of steps that emitted a token there, one colour a source.

    Args:
        places: shares by source, one dictionary a place.
        columns: room for so many places, the same in all such pictures.
    """
    totals = [sum(shares.values()) for shares in places]
    said = ", ".join(f"{total:.0%} at place {place}" for place, total in enumerate(totals, start=1))
    label = f"Share of steps that emitted a token: {said}."
    return both(lambda width: _columns(places, columns, width, label), 240, narrow=165)


def _columns(places: Sequence[dict[str, float]], columns: int, width: float, label: str) -> Drawing:
    drawing = Drawing(width, 0.8 * width, label)
    y = Scale(0, 1, drawing.height - 20, 16)
    for tick in (0, 0.5, 1):
        drawing.line(30, y(tick), width, y(tick), "grid")
        drawing.text(28, y(tick) + 4, f"{100 * tick:g}%", "tick", "end")
    room = (width - 32) / columns
    for number, shares in enumerate(places):
        left, below = 32 + number * room, 0.0
        for source, share in shares.items():
            title = f"{source}: {share:.1%} of the steps at place {number + 1}"
            top, bottom = y(below + share), y(below)
            drawing.box(left + 0.1 * room, top, 0.8 * room, bottom - top, f"source {source}", title)
            below += share
        drawing.text(left + room / 2, y(below) - 4, f"{100 * below:.0f}", "tick", "middle")
        drawing.text(left + room / 2, drawing.height - 4, str(number + 1), "tick", "middle")
    return drawing

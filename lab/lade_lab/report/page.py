"""A run as one self-contained HTML page."""

from __future__ import annotations

import os
import shlex
from base64 import b64encode
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
from markupsafe import Markup

from lade.cli.terminal import count
from lade.errors import MissingExtraError
from lade_lab.breakdown import SOURCES, Answer, answers, points_of
from lade_lab.report import glossary
from lade_lab.report.figures import MEANINGS, can_draw, pictures
from lade_lab.report.prose import (
    LOSS,
    closing,
    findings,
    is_loss,
    machine_line,
    manner,
    method_detail,
    model_line,
    number,
    parameters,
    percent,
    workload_name,
)
from lade_lab.report.table import COLUMNS, Column, named
from lade_lab.results import Replay, Results
from lade_lab.summary import Summary, summarise


@dataclass(frozen=True)
class LaneStep:
    """What appears at once.

    Attributes:
        pieces: text of each token.
        sources: who proposed each.
        seconds: that it took.
    """

    pieces: list[str]
    sources: list[str]
    seconds: float


@dataclass(frozen=True)
class Lane:
    """One side.

    Attributes:
        name: of the method.
        note: where its times are from, if not from watching it.
        steps: the first one is prefill.
    """

    name: str
    note: str
    steps: list[LaneStep]

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def sources(self) -> list[str]:
        """All that occur, in the order of their first token."""
        return list(dict.fromkeys(source for step in self.steps for source in step.sources))


@dataclass(frozen=True)
class Show:
    """One answer.

    Attributes:
        workload, prompt: which.
        lanes: the method, and if its pace is known the one that makes a token a step.
    """

    workload: str
    prompt: str
    lanes: list[Lane]

    @property
    def seconds(self) -> float:
        """Of the slower lane."""
        return max(lane.seconds for lane in self.lanes)


def shows_of(results: Results, base: str | None) -> list[Show]:
    """All recorded answers of methods that make several tokens in a step; of others if there are only those.

    Beside each stands what the base was seen to do with the same prompt; where that was not recorded, the same tokens
    one a step, each at the base's mean step time on this prompt.

    Args:
        results: a run.
        base: the method that feeds one token a step.
    """
    found = [replay for replay in results.replays if replay.steps]
    several = [replay for replay in found if any(len(step["pieces"]) > 1 for step in replay.steps)]
    return [_show(replay, results, base) for replay in several or found]


def _show(replay: Replay, results: Results, base: str | None) -> Show:
    own = _lane(replay)
    if base is None or replay.method == base:
        return Show(replay.workload, replay.prompt, [own])
    beside = [each for each in results.replays if (each.workload, each.prompt) == (replay.workload, replay.prompt)]
    watched = next((_lane(each) for each in beside if each.method == base and each.steps), None)
    other = watched or _paced(own, replay, results, base)
    return Show(replay.workload, replay.prompt, [own, other] if other else [own])


def _lane(replay: Replay) -> Lane:
    steps = [LaneStep(list(step["pieces"]), list(step["sources"]), float(step["seconds"])) for step in replay.steps]
    return Lane(replay.method, "", steps)


def _paced(own: Lane, replay: Replay, results: Results, base: str) -> Lane | None:
    samples = [
        sample for sample in results.of(base, replay.workload) if sample.prompt == replay.prompt and sample.steps
    ]
    if not samples:
        return None
    step_s = fmean(sample.decode_s / sample.steps for sample in samples)
    prefill_s = fmean(sample.prefill_s for sample in samples)
    pieces = [piece for step in own.steps for piece in step.pieces]
    sources = ["prefill", *["bonus"] * (len(pieces) - 1)]
    steps = [
        LaneStep([piece], [source], step_s if place else prefill_s)
        for place, (piece, source) in enumerate(zip(pieces, sources, strict=False))
    ]
    return Lane(base, "each step at its mean time on this prompt", steps)


MOST_ANSWERS = 1000
"""Rows of the table of single answers; a page with more is slow to open."""

MOST_MISMATCHES = 200
MOST_SHOWS = 8

SPEEDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Of a replay, by the speed at which it ran."""

FIRST = ("method", "text", "speed-up", "tok/s", "S", "cost")
"""Columns that are always shown, by their headings; a switch shows the others after them."""

_WATCHABLE_S = 14.0


def write_report(results: Results, path: str | os.PathLike[str]) -> None:
    """Write the page.

    Args:
        results: a run, complete or not; what is missing is left out or shown as missing.
        path: of the file, usually with the ending `.html`.
    """
    Path(path).write_text(page(results), encoding="utf-8")


def page(results: Results) -> str:
    """The whole page as text."""
    summary = summarise(results)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lade_lab.report", "template"),
        autoescape=True,  # texts of prompts and answers are anybody's
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        count=count, is_loss=is_loss, number=number, percent=percent, method_detail=method_detail, parameters=parameters
    )
    template = environment.get_template("page.html")
    return template.render(**_context(results, summary))


def _context(results: Results, summary: Summary) -> dict[str, Any]:
    every, shows = answers(results), _fastest_first(shows_of(results, summary.base), summary)[:MOST_SHOWS]
    return {
        "style": _asset("style.css"),
        "script": _asset("page.js"),
        "results": results,
        "summary": summary,
        "findings": findings(results, summary),
        "lines": {"model": model_line(results), "machine": machine_line(results), "manner": manner(results)},
        "command": shlex.join(results.command),
        "columns": [_heading(column, summary) for column in _columns()],
        "first": len(FIRST),
        "words": glossary.columns(summary),
        "terms": glossary.terms(summary),
        "kinds": glossary.methods(results),
        "blocks": [_block(summary, place) for place in range(len(summary.blocks))],
        "closing": closing(summary),
        "pictures": _pictures(results),
        "due": any(point.even is not None for point in points_of(summary)),
        "remedy": None if can_draw() else MissingExtraError("matplotlib", "bench"),
        "sources": _sources(results, shows),
        "shows": shows,
        "tapes": [[_tape(lane) for lane in show.lanes] for show in shows],
        "timeline": [_timeline(show) for show in shows],
        "speeds": SPEEDS,
        "answers": every[:MOST_ANSWERS],
        "answer_count": len(every),
        "answer_columns": _answer_columns(every),
        "mismatches": sorted(results.mismatches, key=lambda each: each.near_tie)[:MOST_MISMATCHES],
        "data": {"command": results.command, "created": results.created, "summary": summary.as_dict()},
        "loss_mark": LOSS,
    }


def _asset(name: str) -> Markup:
    return Markup((files("lade_lab.report") / "template" / name).read_text(encoding="utf-8"))


def _columns() -> list[Column]:
    """In the order of the report."""
    first = [column for head in FIRST for column in COLUMNS if column.head == head]
    return [*first, *(column for column in COLUMNS if column not in first)]


def _heading(column: Column, summary: Summary) -> tuple[str, str]:
    """The heading, and in short what it stands for."""
    return named(column.head, summary), named(column.meaning, summary)


def _block(summary: Summary, place: int) -> dict[str, Any]:
    block = summary.blocks[place]
    rows = [
        {"row": row, "cells": [column.cell(row, summary) for column in _columns()], "fault": row.mismatches > 0}
        for row in block.rows
    ]
    return {"name": workload_name(block), "answers": block.answers, "rows": rows}


def _pictures(results: Results) -> dict[str, Markup]:
    """Each as an element of the page that loads nothing; empty where there is no data for it, or no matplotlib."""
    image = Markup('<img alt="{}" src="data:image/svg+xml;base64,{}">')
    drawn = pictures(results) if can_draw() else {}
    return {
        name: image.format(meaning, b64encode(drawn[name].encode()).decode()) if name in drawn else Markup("")
        for name, meaning in MEANINGS.items()
    }


def _sources(results: Results, shows: list[Show]) -> list[str]:
    """Those that occur, in the order of the legend."""
    seen = {source for show in shows for lane in show.lanes for source in lane.sources}
    seen |= {source for sample in results.samples for place in sample.sources for source in place}
    known = [source for source in ("prefill", *SOURCES) if source in seen]
    return known + sorted(seen - set(known))


def _fastest_first(shows: list[Show], summary: Summary) -> list[Show]:
    speeds = {row.method: row.speedup.each.median for row in summary.overall.rows if row.speedup}
    return sorted(shows, key=lambda show: -speeds.get(show.lanes[0].name, 0.0))


def _tape(lane: Lane) -> Markup:
    """All tokens of a lane, each step one group, so that the text is there without scripts too."""
    token = Markup('<span class="token {}" title="{}">{}</span>')
    group = Markup('<span class="{}" data-step>{}</span>')
    steps = []
    for step in lane.steps:
        pairs = zip(step.pieces, step.sources, strict=False)
        tokens = Markup("").join(token.format(source, source, piece) for piece, source in pairs)
        steps.append(group.format("run" if len(step.pieces) > 1 else "single", tokens))
    return Markup("").join(steps)


def _timeline(show: Show) -> dict[str, Any]:
    """What the script needs: for each lane seconds and number of tokens of each step; and a speed one can follow."""
    slowest_first = [speed for speed in SPEEDS if show.seconds / speed <= _WATCHABLE_S]
    lanes = [[[round(step.seconds, 6), len(step.pieces)] for step in lane.steps] for lane in show.lanes]
    return {"lanes": lanes, "speed": slowest_first[0] if slowest_first else SPEEDS[-1]}


def _answer_columns(every: list[Answer]) -> dict[str, bool]:
    """Which columns tell answers apart."""
    return {
        "turn": any(each.turn for each in every),
        "seed": len({each.seed for each in every}) > 1,
    }

"""A run as one self-contained HTML page."""

from __future__ import annotations

import os
import shlex
from base64 import b64encode
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lade.cli.terminal import count
from lade.errors import MissingExtraError
from lade_lab.breakdown import Answer, answers, points_of
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
from lade_lab.results import Results
from lade_lab.summary import Summary, summarise

MOST_ANSWERS = 1000
"""Rows of the table of single answers; a page with more is slow to open."""

MOST_MISMATCHES = 200

FIRST = ("method", "text", "speed-up", "tok/s", "S", "cost")
"""Columns that are always shown, by their headings; a switch shows the others after them."""


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
    every = answers(results)
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
        "blocks": [_block(summary, place) for place in range(len(summary.blocks))],
        "closing": closing(summary),
        "pictures": _pictures(results),
        "due": any(point.even is not None for point in points_of(summary)),
        "remedy": None if can_draw() else MissingExtraError("matplotlib", "bench"),
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


def _answer_columns(every: list[Answer]) -> dict[str, bool]:
    """Which columns tell answers apart."""
    return {
        "turn": any(each.turn for each in every),
        "seed": len({each.seed for each in every}) > 1,
    }

"""A run as a table: terminal, plain text, Markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lade.cli.terminal import count
from lade_lab.report.prose import (
    LOSS,
    MISSING,
    Finding,
    closing,
    findings,
    is_loss,
    machine_line,
    model_line,
    number,
    percent,
    rate,
    text_of,
    workload_name,
)
from lade_lab.results import Results
from lade_lab.summary import Block, Row, Spread, Summary, summarise

STYLES = {
    "incomplete": "yellow",
    "fault": "bold red",
    "tie": "yellow",
    "loss": "red",
    "gain": "green",
    "equal": "green",
}
_WIDEST_NAME = 24


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        head: its heading.
        meaning: what the heading stands for; empty where it says all.
        cell: makes the text of a row's cell.
        rank: columns of higher rank are left out first where there is no room.
        markdown: whether it is in the table for READMEs.
    """

    head: str
    meaning: str
    cell: Callable[[Row, Summary], str]
    rank: int = 0
    markdown: bool = True


def _speedup(row: Row, _: Summary) -> str:
    return _marked(row.speedup.each.median) if row.speedup else MISSING


def _over_base(row: Row, _: Summary) -> str:
    return _marked(row.decode_speedup.total) if row.decode_speedup else MISSING


def _marked(value: float) -> str:
    return f"{LOSS} {value:.2f}" if is_loss(value) else f"{value:.2f}"


def _quartiles(spread: Spread | None, form: Callable[[float], str]) -> str:
    return f"{form(spread.low)}-{form(spread.high)}" if spread else MISSING


def _median(spread: Spread | None) -> float | None:
    return spread.median if spread else None


COLUMNS = (
    Column("method", "", lambda row, _: row.method),
    Column("text", "whether answers equal {reference}'s", text_of),
    Column("speed-up", "of the whole call over {reference}, answer by answer: median", _speedup),
    Column(
        "quartiles",
        "of the column before",
        lambda row, _: _quartiles(row.speedup.each if row.speedup else None, number),
        rank=1,
    ),
    Column(
        "total",
        "speed-up of all answers together",
        lambda row, _: number(row.speedup.total if row.speedup else None),
        rank=3,
    ),
    Column("S", "tokens per step", lambda row, _: number(row.tokens_per_step)),
    Column("fed", "tokens fed per step", lambda row, _: number(row.fed_per_step, 1)),
    Column("cost", "seconds of a step by those of {base}, which feeds one token", lambda row, _: number(row.step_cost)),
    Column(
        "S/cost",
        "what S and cost promise: tokens per step by the price of a step",
        lambda row, _: number(row.identity.expected if row.identity else None),
        rank=2,
    ),
    Column(
        "over {base}",
        "measured speed-up over {base} after prefill, all answers together",
        _over_base,
        rank=2,
    ),
    Column(
        "own",
        "share of the time after prefill outside the model's passes: choosing tokens, drafting, learning, the loop",
        lambda row, _: percent(row.library_share),
    ),
    Column("tok/s", "tokens a second after the first: median", lambda row, _: rate(_median(row.decode_rate))),
    Column("tok/s, quartiles", "", lambda row, _: _quartiles(row.decode_rate, rate), rank=6, markdown=False),
    Column(
        "call",
        "tokens a second, prefill included: median",
        lambda row, _: rate(_median(row.call_rate)),
        rank=5,
        markdown=False,
    ),
    Column(
        "4-grams",
        "share of distinct ones in an answer, median; a text that loops is easy to guess",
        lambda row, _: percent(_median(row.distinct_4grams)),
        rank=4,
    ),
)


def print_table(results: Results, console: Console) -> None:
    """One table a workload, and one over all of them if there are several.

    Columns are left out, the least important first, until the rest fits the console's width; none is cut off.
    """
    summary = summarise(results)
    columns = _fitting(summary, console.width)
    for block in summary.blocks:
        console.print(_table(block, summary, columns))
        console.print()
    for line in notes(results, summary, columns):
        console.print(Text(line, "dim"))
    console.print()
    for finding in findings(results, summary):
        console.print(Text(finding.text, STYLES[finding.kind]))


def as_markdown(results: Results) -> str:
    """The same for a README: tables, what they were measured on, what the columns mean.

    Losses are marked and no column is left out but those that say more of another one.
    """
    summary = summarise(results)
    columns = [column for column in COLUMNS if column.markdown]
    parts = [_bullets(findings(results, summary))]
    for block in summary.blocks:
        if len(summary.blocks) > 1:
            parts.append(f"**{_escaped(workload_name(block))}**: {_size(block, summary)}")
        parts.append(_markdown_table(block, summary, columns))
    parts += map(_escaped, notes(results, summary, columns))
    return "\n\n".join(parts) + "\n"


def notes(results: Results, summary: Summary, columns: list[Column]) -> list[str]:
    """Lines that belong below tables: what was run, on what, what columns mean, how well they fit together."""
    lines = [model_line(results), machine_line(results), legend(columns, summary), closing(summary)]
    return [line for line in lines if line]


def legend(columns: list[Column], summary: Summary) -> str:
    """Return the meaning of the columns on one line."""
    meanings = [f"{named(each.head, summary)}: {named(each.meaning, summary)}" for each in columns if each.meaning]
    return " · ".join([*meanings, f"{LOSS}: slower", f"{MISSING}: not measured"])


def named(text: str, summary: Summary) -> str:
    """A heading or its meaning with the names of this run in it."""
    return text.replace("{reference}", summary.reference).replace("{base}", summary.base or "plain")


def _fitting(summary: Summary, width: int) -> list[Column]:
    columns = list(COLUMNS)
    while columns and sum(_width(column, summary) + 1 for column in columns) - 1 > width:
        least = max(columns, key=lambda column: column.rank)
        if not least.rank:
            break
        columns.remove(least)
    return columns


def _width(column: Column, summary: Summary) -> int:
    cells = [column.cell(row, summary) for block in summary.blocks for row in block.rows]
    longest = max([len(named(column.head, summary)), *map(len, cells)])
    return min(longest, _WIDEST_NAME) if column is COLUMNS[0] else longest


def _table(block: Block, summary: Summary, columns: list[Column]) -> Table:
    title = f"{workload_name(block)}: {_size(block, summary)}"
    table = Table(title=title, title_style="bold", title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        first = column is COLUMNS[0]
        table.add_column(
            named(column.head, summary),
            justify="left" if column in COLUMNS[:2] else "right",
            no_wrap=not first,
            min_width=_width(column, summary),
            overflow="fold",
        )
    for row in block.rows:
        table.add_row(*(Text(column.cell(row, summary)) for column in columns), style=_style(row))
    return table


def _size(block: Block, summary: Summary) -> str:
    text = count(block.answers, "answer")
    distinct = next((row.distinct_4grams for row in block.rows if row.method == summary.reference), None)
    return f"{text}, {percent(distinct.median)} of 4-grams distinct" if distinct else text


def _style(row: Row) -> str:
    if row.mismatches:
        return STYLES["fault"]
    return STYLES["loss"] if row.speedup and is_loss(row.speedup.each.median) else ""


def _markdown_table(block: Block, summary: Summary, columns: list[Column]) -> str:
    lines = [[named(column.head, summary) for column in columns], ["---", "---", *["---:"] * (len(columns) - 2)]]
    for row in block.rows:
        cells = [column.cell(row, summary) for column in columns]
        lines.append([_escaped(cell) for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _bullets(found: list[Finding]) -> str:
    return "\n".join(f"- {_escaped(finding.text)}" for finding in found)


def _escaped(text: str) -> str:
    """Safe in Markdown: names of methods and files may hold what it has a meaning for."""
    for character in "\\`*_|<>[]":
        text = text.replace(character, "\\" + character)
    return text

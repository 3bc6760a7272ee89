"""The table fits, says what is lost in more than colour, and is right in Markdown."""

from dataclasses import replace
from io import StringIO

import pytest
from made_results import METHODS, made_results
from rich.console import Console

from lade_lab.report.prose import _closely
from lade_lab.report.table import as_markdown, print_table
from lade_lab.results import Method

RESULTS = made_results(prompts=4)


def printed(results, width, **more):
    console = Console(width=width, file=StringIO(), **more)
    print_table(results, console)
    return console.file.getvalue()


def rows_of(text, method):
    """Cells of a method in the Markdown tables."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {method} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_every_method_is_on_one_line_that_fits(width):
    lines = printed(RESULTS, width).splitlines()
    assert max(map(len, lines)) <= width
    for method in METHODS:
        own = [line for line in lines if line == method.name or line.startswith(method.name + " ")]
        assert len(own) >= 4, method.name
    assert not any("…" in line for line in lines)


def test_narrow_tables_leave_out_the_least_important_columns():
    narrow, wide = printed(RESULTS, 80), printed(RESULTS, 200)
    for head in ("text", "speed-up", "quartiles", "tok/s", "fed", "cost", "own"):
        assert head in narrow.splitlines()[1]
    assert "S/cost" not in narrow.splitlines()[1]
    for head in ("total", "S/cost", "over plain", "4-grams", "tok/s, quartiles", "call"):
        assert head in wide.splitlines()[1]


def test_there_is_a_block_for_each_workload_and_one_for_all():
    text = printed(RESULTS, 120)
    for title in ("humaneval: 4 answers", "gsm8k: 4 answers", "mt-bench: 8 answers", "all workloads: 16 answers"):
        assert title in text
    assert "all workloads" not in printed(made_results(prompts=2, workloads=("gsm8k",)), 120)


def test_a_loss_is_marked_and_red():
    plain = printed(RESULTS, 120)
    (line,) = [line for line in plain.splitlines() if line.startswith("lookahead 15,5,15")][2:3]
    assert "▼ 0.7" in line
    coloured = printed(RESULTS, 120, force_terminal=True, color_system="standard")
    (line,) = [line for line in coloured.splitlines() if "lookahead 15,5,15" in line][2:3]
    assert line.startswith("\x1b[31m")
    assert "\x1b" not in plain


def test_it_says_what_ran_on_what_and_what_was_found_and_how_it_was_sampled():
    text = " ".join(printed(RESULTS, 120).split())
    facts = ("AMD EPYC 9654", "2 threads", "bfloat16", "torch 2.13.0", "commit 0123abc", "502M parameters", "greedy")
    assert [fact for fact in facts if fact not in text] == []
    assert "cost: seconds of a step by those of plain" in text
    assert "Texts differ from hf's by more than rounding explains: 1 of 16 answers of jacobi." in text
    assert "match the measured speed over plain to within 0.0%" in text
    assert text.index("Texts differ") < text.index("The fastest") < text.index("Slower")
    settings = replace(RESULTS.settings, temperature=0.7, top_k=50, seeds=[0, 1], repeats=3, ignore_eos=True)
    text = " ".join(printed(replace(RESULTS, settings=settings), 120).split())
    assert "sampled at temperature 0.7, top_k 50, 2 seeds" in text
    assert "each answer timed 3 times" in text
    assert "past the end of the text" in text


def test_missing_figures_are_dashes():
    found = replace(RESULTS, samples=[each for each in RESULTS.samples if each.method == "hf"], complete=False)
    text = as_markdown(found)
    assert set(rows_of(text, "adaptive")[0][1:]) == {"-"}
    assert "interrupted" in text
    assert printed(replace(RESULTS, samples=[]), 80)


def test_markdown_has_a_row_for_each_method_in_each_block():
    text = as_markdown(RESULTS)
    for method in METHODS:
        assert len(rows_of(text, method.name)) == 4
    heads = [line for line in text.splitlines() if line.startswith("| method")]
    rules = [line for line in text.splitlines() if line.startswith("| ---")]
    assert len(heads) == len(rules) == 4
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    cells = dict(zip(heads[0].strip("| ").split(" | "), rows_of(text, "lookahead 15,5,15")[2], strict=True))
    assert cells["speed-up"].startswith("▼ 0.7") and cells["text"] == "equal"
    assert cells["S/cost"] == cells["over plain"].removeprefix("▼ ")
    assert "commit 0123abc" in text


def test_markdown_escapes_names_and_calls_no_text_equal_that_was_not_compared():
    methods = [METHODS[0], Method("a|b*c", "plain"), replace(METHODS[1], compared=False)]
    text = as_markdown(made_results(prompts=1, methods=methods, workloads=("gsm8k",)))
    assert "| a\\|b\\*c |" in text
    assert rows_of(text, "hf-prompt-lookup")[0][1] == "not compared"


def test_a_prediction_far_off_is_a_factor_and_no_percentage():
    assert _closely(1.81, 0) == "only within a factor of 2.8"
    assert _closely(0.21, 0) == "to within 21%" and _closely(0.0, 1) == "to within 0.0%"

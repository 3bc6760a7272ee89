"""Glossary of a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lade.cli.terminal import count
from lade_lab.report.prose import LOSS, number, percent
from lade_lab.results import Results
from lade_lab.summary import Row, Summary

COLUMNS = {
    "method": "A way to decode. What each one does stands below.",
    "text": "Whether a method wrote the same tokens as {reference}. That comes first: a faster method that writes "
    "another text has won nothing. A near tie is a place where two tokens score alike and rounding decides.",
    "speed-up": "How many times as fast as {reference} the whole call was, prompt included; 2 means half the time. It "
    "is taken answer by answer, and this is the median: half of the answers gained more, half less. {loss} marks what "
    "is slower.",
    "tok/s": "Tokens written in a second once the first one is there. The median over answers.",
    "S": "Tokens per step, also called the compression ratio: how many tokens one pass of the model brings on average. "
    "One token a step has 1.",
    "cost": "How long a step takes, if a step of {base} takes 1. It is also the break-even: a method gains where S is "
    "higher than this, and loses where it is lower.",
    "fed": "How many tokens a step gives to the model at once: the last one written, which is sure, and guesses at "
    "what follows. The more guesses, the more may be right, and the longer the step takes.",
    "quartiles": "The spread of the speed-up: half of the answers lie between these two, a quarter below, a quarter "
    "above.",
    "total": "The speed-up of all answers together, so that long answers count for more.",
    "S/cost": "What S and cost promise: tokens per step, divided by the price of a step.",
    "over {base}": "What was measured of that promise: the speed-up over {base} after the prompt, all answers "
    "together.",
    "own": "Share of the time after the prompt that is spent outside the model: guessing, checking, keeping books.",
    "tok/s, quartiles": "The spread of the tokens in a second.",
    "call": "Tokens in a second of the whole call, prompt included. The median over answers.",
    "4-grams": "How varied the texts are: of all four tokens in a row in an answer, the share that are different ones. "
    "A text that repeats itself is easy to guess, and makes every method here look good.",
}
"""What each column of the table says, by its heading."""

KINDS = {
    "hf": "Transformers' own model.generate, one token a step.",
    "hf-prompt-lookup": "model.generate with prompt lookup: guesses are copied from where the last words stood before.",
    "hf-assisted": "model.generate with a draft model: a smaller model guesses, the large one checks.",
    "plain": "This library's loop with one token a step, nothing guessed: what the loop itself costs or saves.",
    "jacobi": "Jacobi decoding: guesses for the next places are put in, and better ones read off, step by step.",
    "prompt-lookup": "Prompt lookup in this library's loop: what followed the last words wherever they stood before.",
    "suffix": "SuffixDecoding in this library's loop: what followed the longest ends of the text, by how often it did.",
    "token-recycling": "Token Recycling in this library's loop: what was likely after a token the last time, in a tree "
    "of a fixed shape.",
    "hf-mtp": "model.generate(use_mtp=True): MTP layers of the checkpoint guess a chain of tokens.",
    "mtp": "A chain of the checkpoint's MTP layer in this library's loop: the likeliest token after each.",
    "lookahead": "The paper's method: a window finds strings of tokens that fit together, and checks them where they "
    "may follow.",
    "adaptive": "This library's own method: a tree of guesses from everything the model has computed so far. What a "
    "step costs on this machine, and what guesses have brought, decide how large it is.",
    "adaptive-warm": "The same, with what it has learned kept from one prompt to the next.",
}
"""What each kind of method does."""


@dataclass(frozen=True)
class Entry:
    """A word and what it means.

    Attributes:
        word: as the report has it.
        text: its meaning.
        examples: what it comes to in this run, one sentence each; may be empty.
    """

    word: str
    text: str
    examples: tuple[str, ...] = ()


def terms(summary: Summary) -> list[Entry]:
    """The words that are used beside those of the columns."""
    base = summary.base or "one token a step"
    return [
        Entry(
            "step",
            "One forward pass of the model after the prompt's own pass, which is called prefill. Plain decoding makes "
            "one for each token.",
        ),
        Entry(
            "compression ratio",
            "Tokens per step, S: the number of tokens written, divided by the number of steps they took. It says what "
            "the guesses are worth, on any machine; how fast that is depends on what a step costs there.",
        ),
        Entry("fed", "What a step gives to the model: one token that is sure, and guesses.", _each(summary, _fed)),
        Entry(
            "acceptance",
            "The model checks all guesses of a step at once. Those that are what it would have written itself are "
            "accepted, the others are dropped; after them it always adds one token of its own, the bonus.",
            _each(summary, _accepted),
        ),
        Entry(
            "break-even",
            f"A step that feeds guesses takes longer than one of {base}. At break-even it brings just as many tokens "
            "more as it takes longer. Below that a method is slower, however many guesses are right.",
            _each(summary, _even),
        ),
        Entry(
            "spread",
            "Answers differ in how well they can be guessed, and a machine is never quite as fast twice. So a median "
            "is given with its quartiles, between which the middle half of the answers lies.",
            _each(summary, _spread),
        ),
        Entry(
            "reference",
            f"The method that the others are compared with: {summary.reference}. Step costs are relative to {base}, "
            "whose steps feed one token.",
        ),
    ]


def columns(summary: Summary) -> dict[str, str]:
    """`COLUMNS` with the names of this run in them."""
    names = {"reference": summary.reference, "base": summary.base or "plain", "loss": LOSS}
    return {head.format_map(names): text.format_map(names) for head, text in COLUMNS.items()}


def methods(results: Results) -> dict[str, str]:
    """What each method of the run does, by its name."""
    return {method.name: KINDS.get(method.kind, method.kind) for method in results.methods}


def _each(summary: Summary, say: Callable[[Row], str | None]) -> tuple[str, ...]:
    """A sentence for each method that guesses, where there is something to say."""
    rows = [row for row in summary.overall.rows if row.method not in (summary.base, summary.reference)]
    return tuple(text for row in rows if (text := say(row)))


def _fed(row: Row) -> str | None:
    if row.fed_per_step is None or row.fed_per_step <= 1:
        return None
    return (
        f"{row.method}: {number(row.fed_per_step, 1)} tokens a step, {number(row.fed_per_step - 1, 1)} of them guesses."
    )


def _accepted(row: Row) -> str | None:
    if row.fed_per_step is None or row.tokens_per_step is None or row.fed_per_step <= 1:
        return None
    guesses, accepted = row.fed_per_step - 1, row.tokens_per_step - 1
    return (
        f"{row.method}: of {number(guesses, 1)} guesses a step, {number(accepted)} were accepted "
        f"({percent(accepted / guesses)})."
    )


def _even(row: Row) -> str | None:
    if row.step_cost is None or row.tokens_per_step is None:
        return None
    verdict = "a gain" if row.tokens_per_step >= row.step_cost else "a loss"
    return (
        f"{row.method}: a step took {number(row.step_cost)} times as long, so {number(row.step_cost)} tokens per step "
        f"break even; it brought {number(row.tokens_per_step)}, {verdict}."
    )


def _spread(row: Row) -> str | None:
    if row.speedup is None or row.speedup.each.count < 2:
        return None
    each = row.speedup.each
    return (
        f"{row.method}: speed-up {number(each.median)}, the middle half of {count(each.count, 'answer')} from "
        f"{number(each.low)} to {number(each.high)}."
    )

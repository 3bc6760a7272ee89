"""Workloads: prompts from public benchmark files, one's own, or built in.

A format is recognised by the keys of a file's first entry; where one format's keys include another's, it is the one
with more keys.

>>> workloads = lade.bench.workloads
>>> workload = workloads.load("HumanEval.jsonl.gz", limit=20)
>>> workload.record.format, len(workload.items)
('humaneval', 20)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from lade.errors import InputError
from lade_lab import results
from lade_lab.workload_file import Entry, parse, read_bytes


@dataclass(frozen=True)
class Item:
    """One prompt, or a conversation of several turns.

    Attributes:
        id: unique in its workload.
        turns: what the user says, turn by turn; one for all but conversations.
        chat: whether the turns are messages, for the tokenizer's chat template where there is one. Otherwise they are
            texts to be continued as they are.
        plain: the turns worded for a model without a chat template, as many; None: as they are.
        category: what the file calls the kind of prompt; None where it does not.
    """

    id: str
    turns: list[str]
    chat: bool
    plain: list[str] | None = None
    category: str | None = None

    def worded(self, template: bool) -> list[str]:
        """The turns as a model is to get them.

        Args:
            template: whether its tokenizer has a chat template; if so and `chat`, they go through it.
        """
        return self.turns if template or self.plain is None else self.plain


@dataclass(frozen=True)
class Workload:
    """Prompts to run, and the record of where they came from."""

    record: results.Workload
    items: list[Item]


TALK = "mt_bench"
"""Spec-Bench's task of conversations in two turns: MT-Bench's questions, which keep their own categories."""

TALK_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""MT-Bench's categories."""


@dataclass(frozen=True)
class Format:
    """Format of the entries of a file.

    Attributes:
        keys: what an entry must have; any one of these sets.
        item: makes a prompt of one.
        file: what the published file is called, without its ending; empty for one's own prompts.
    """

    keys: tuple[frozenset[str], ...]
    item: Callable[[Entry], Item]
    file: str = ""


def _conversation(entry: Entry) -> Item:
    """Spec-Bench (github.com/hemingkx/Spec-Bench) and MT-Bench (github.com/lm-sys/FastChat)."""
    category = entry.text("category") if "category" in entry.values else None
    return Item(entry.name("question_id"), entry.texts("turns"), chat=True, category=category)


def _humaneval(entry: Entry) -> Item:
    """github.com/openai/human-eval: the beginning of a function, continued as it is."""
    return Item(entry.name("task_id"), [entry.text("prompt")], chat=False)


def _mbpp(entry: Entry) -> Item:
    """github.com/google-research/google-research, folder mbpp: the paper's prompt (arXiv 2108.07732), no examples.

    The sanitized file has the task under `prompt`. `[BEGIN]`, after which the paper's examples have their code, is for
    models without a chat template.
    """
    task = entry.text("text" if "text" in entry.values else "prompt")
    tests = "\n".join(entry.texts("test_list"))
    asked = f"You are an expert Python programmer, and here is your task: {task} Your code should pass these tests:"
    message = f"{asked}\n\n{tests}\n"
    return Item(entry.name("task_id"), [message], chat=True, plain=[f"{message}[BEGIN]\n"])


def _gsm8k(entry: Entry) -> Item:
    """github.com/openai/grade-school-math, which has no ids: the number of the line is the id."""
    question = entry.text("question")
    return Item(str(entry.number), [question], chat=True, plain=[f"Question: {question}\nAnswer:"])


def _classeval(entry: Entry) -> Item:
    """github.com/FudanSELab/ClassEval: the whole class at once; base models continue the skeleton, as in its code."""
    skeleton = entry.text("skeleton")
    message = f"Please complete the class {entry.text('class_name')} in the following code.\n{skeleton}"
    return Item(entry.name("task_id"), [message], chat=True, plain=[skeleton])


def _jsonl(entry: Entry) -> Item:
    """One's own prompts; without an `id` the number of the line is the id."""
    name = entry.name("id") if "id" in entry.values else str(entry.number)
    category = entry.text("category") if "category" in entry.values else None
    return Item(name, [entry.text("prompt")], chat=True, category=category)


def _keys(*sets: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(each.split()) for each in sets)


_FORMATS = {
    "spec-bench": Format(_keys("question_id turns"), _conversation, "question"),
    "mt-bench": Format(_keys("question_id turns"), _conversation, "question"),
    "humaneval": Format(_keys("task_id prompt"), _humaneval, "HumanEval"),
    "mbpp": Format(_keys("task_id text test_list", "task_id prompt test_list"), _mbpp, "mbpp"),
    "gsm8k": Format(_keys("question answer"), _gsm8k, "test"),
    "classeval": Format(_keys("task_id skeleton class_name"), _classeval, "ClassEval_data"),
    "jsonl": Format(_keys("prompt"), _jsonl),
}
FORMATS = tuple(_FORMATS)
"""Names of the formats. Their entries have these keys, others are passed over:

    spec-bench, mt-bench   question_id, turns, category      conversations
    humaneval              task_id, prompt                   beginnings of functions, continued as they are
    mbpp                   task_id, text, test_list          tasks; with `prompt` in place of `text` if sanitized
    gsm8k                  question, answer                  questions
    classeval              task_id, skeleton, class_name     classes to complete
    jsonl                  prompt; id, category if wanted    one's own prompts

All but HumanEval's are messages to a model with a chat template, and continued as they are by others.
"""


def check(name: str) -> None:
    """Raise `InputError` for the name of no format."""
    if name not in _FORMATS:
        raise InputError(f"format={name!r} is not known: give one of {', '.join(FORMATS)}")


def named(format: str, file: str) -> str:
    """Return the name of a workload: its format for benchmarks, with the file's name unless it is the published one.

    Args:
        format: its name.
        file: name of the file, without its ending.
    """
    published = _FORMATS[format].file
    if not published:
        return file
    return format if file == published else f"{format}-{file}"


def recognised(entries: Sequence[Entry]) -> str:
    """The name of the format that the first entry's keys fit.

    Spec-Bench and MT-Bench have the same keys; a file is MT-Bench's if all its categories are.

    Raises:
        InputError: they fit none, or several.
    """
    first = entries[0]
    fitting = {keys: name for name, each in _FORMATS.items() for keys in each.keys if keys <= first.values.keys()}
    names = sorted(name for keys, name in fitting.items() if not any(keys < other for other in fitting))
    there = ", ".join(map(repr, first.values)) or "no keys"
    if not names:
        known = "; ".join(f"{name}: {' '.join(sorted(each.keys[0]))}" for name, each in _FORMATS.items())
        raise InputError(
            f"{first.place} has {there}, which matches no known format: give format=, or its keys ({known})"
        )
    if len(names) > 1:
        raise InputError(f"{first.place} has {there}, which fits {' and '.join(names)}: say which by format=")
    if names[0] in ("spec-bench", "mt-bench"):
        talk = all(entry.values.get("category") in TALK_CATEGORIES for entry in entries)
        return "mt-bench" if talk else "spec-bench"
    return names[0]


def read(entries: Sequence[Entry], name: str) -> list[Item]:
    """The prompts of a file.

    Args:
        entries: what is in it.
        name: of the format.

    Raises:
        InputError: an entry lacks a key or has something else there, or two have one id.
    """
    places: dict[str, str] = {}
    items = []
    for entry in entries:
        item = _FORMATS[name].item(entry)
        if item.id in places:
            raise InputError(f"{entry.place} has the id {item.id!r} of {places[item.id]}: give each its own")
        places[item.id] = entry.place
        items.append(item)
    return items


def chosen(items: Sequence[Item], category: str) -> list[Item]:
    """The items of one category; `mt_bench` is all of MT-Bench's, as Spec-Bench groups them.

    Raises:
        InputError: there are none.
    """
    wanted = TALK_CATEGORIES if category == TALK else (category,)
    found = [item for item in items if item.category in wanted]
    if not found:
        names = {item.category for item in items if item.category is not None}
        if names & set(TALK_CATEGORIES):
            names.add(TALK)
        there = ", ".join(sorted(names))
        remedy = f"give one of {there}" if there else "its entries have none, leave #... away"
        raise InputError(f"no entry is of category {category!r}: {remedy}")
    return found


BUILTIN = "builtin"
"""Beginnings of standard library functions that the embedded model was not trained on."""


def load(source: str | Path, format: str | None = None, limit: int | None = None, *, raw: bool = False) -> Workload:
    """Read prompts.

    Args:
        source: a file: JSON lines or a JSON array, gzipped if its name ends in `.gz`. `path#category` takes the
            entries of one category. `"builtin"` is a set of beginnings of Python functions that needs no file.
        format: how its entries are read, one of `FORMATS`; None recognises it by the keys of the first one.
        limit: the largest number of prompts, the first ones; None takes all.
        raw: continue the prompts as they are even if the model has a chat template; the name says so.

    Returns:
        The prompts in the file's order. One's own are named like their file, a benchmark's like its format, such as
            `gsm8k`; if the file is not called as it was published, its name follows, as in `gsm8k-train`.

    Raises:
        InputError: there is no such file, format or category, an entry is not what its format wants, or `limit` is
            below 1. All entries are checked, also those after the limit.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit={limit} is not valid: give at least 1, or None for all prompts")
    if format is not None:
        check(format)
    where, category = _split(str(source))
    if where == BUILTIN and not isinstance(source, Path):
        if format is not None:
            raise InputError(f"format={format!r} is for files: leave it out with {BUILTIN!r}")
        return _builtin(category, limit)
    path = Path(where)
    content = read_bytes(path)
    entries = parse(content, path)
    format = format or recognised(entries)
    items = read(entries, format)
    name = named(format, _stem(path))
    if raw:
        items, name = [replace(item, chat=False) for item in items], f"{name} (raw)"
    return _workload(name, format, items, category, limit, hashlib.sha256(content).hexdigest())


def _builtin(category: str | None, limit: int | None) -> Workload:
    path = Path(str(resources.files("lade.embedded") / "builtin.jsonl"))
    items = [replace(item, chat=False) for item in read(parse(read_bytes(path), path), "jsonl")]
    return _workload(BUILTIN, BUILTIN, items, category, limit, None)


def _workload(
    name: str, format: str, items: list[Item], category: str | None, limit: int | None, sha256: str | None
) -> Workload:
    if category is not None:
        items, name = chosen(items, category), f"{name}#{category}"
    items = items[:limit]
    return Workload(results.Workload(name, format, len(items), sha256), items)


def _split(source: str) -> tuple[str, str | None]:
    """Path and category; a file whose own name has a # in it is found by that name."""
    where, mark, category = source.rpartition("#")
    return (where, category) if mark and not Path(source).exists() else (source, None)


def _stem(path: Path) -> str:
    """The file's name without what says that it is JSON."""
    name = path.name.removesuffix(".gz")
    return name.removesuffix(".jsonl").removesuffix(".json") or path.name


__all__ = ["BUILTIN", "FORMATS", "Item", "Workload", "load"]


def distinct_ngrams(tokens: Sequence[int], length: int = 4) -> float:
    """Return the share of distinct n-grams in a text; 1.0 if it is too short to have any.

    A text that loops has a low share, and flatters every method that drafts n-grams.
    """
    ngrams = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0

"""Tokens per step where code is edited: predictions, copies, and peers, at equal sizes.

    python lab/experiments/edits.py --data FOLDER [--limit 97] [--json FILE]

FOLDER has InstructCoder's `edit_eval.jsonl` (github.com/qishenghu/CodeInstruct). The prompt is the instruction and the
code; the answer is the edited code as a whole, or search/replace blocks of it. The recorded answer takes the place of
the model's choices (`lade_lab.replay`), so that all methods write the same. The prediction is the code before the edit,
as a client of `prediction=` would send it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

import lade
from lade.embedded import model_path
from lade_lab.replay import read_model, recorded, replay, table, without_end

SIZES = (8, 16, 32)
CONTEXT_LINES = 1
"""Unchanged lines around a change in a search/replace block."""


class Edit(NamedTuple):
    """One task, in ids: instruction and code, the code before the edit (the prediction), what the model writes."""

    prompt: list[int]
    before: list[int]
    answer: list[int]


def whole_file(before: str, after: str) -> str:
    """Return the answer that repeats the file."""
    return f"```python\n{after}\n```"


def search_replace(before: str, after: str) -> str:
    """Return the answer as search/replace blocks, with a line of context on either side of each change."""
    old, new, blocks = before.splitlines(), after.splitlines(), list[str]()
    for group in SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(CONTEXT_LINES):
        searched = "\n".join(old[group[0][1] : group[-1][2]])
        replaced = "\n".join(new[group[0][3] : group[-1][4]])
        blocks.append(f"<<<<<<< SEARCH\n{searched}\n=======\n{replaced}\n>>>>>>> REPLACE\n")
    return "".join(blocks)


FORMS: dict[str, Callable[[str, str], str]] = {"whole file": whole_file, "search/replace": search_replace}

Method = Callable[[Any, Edit, int], lade.Stats]


def by_peer(drafter: Callable[[int], lade.Drafter]) -> Method:
    """Return a method that does not read logits."""
    return lambda model, edit, size: replay(edit.prompt, edit.answer, drafter(size), model.config.vocab_size)


def adaptive(model: Any, edit: Edit, size: int, prediction: list[int] | None = None) -> lade.Stats:
    """Decode by the library as users call it."""
    text, stats = [*edit.prompt, *edit.answer], lade.Stats()
    arguments = {"max_new_tokens": len(edit.answer), "do_sample": False, "pad_token_id": text[0]}
    config, ids = lade.LookaheadConfig(budget=size), torch.tensor([edit.prompt])
    arguments["attention_mask"] = torch.ones_like(ids)
    with recorded(model, text):
        found = lade.generate(model, ids, prediction=prediction, lookahead=config, stats=stats, **arguments)
    assert found[0].tolist() == text, "the recorded text is not what was decoded"
    return stats


METHODS: dict[str, Method] = {
    "prompt lookup": by_peer(lade.peers.PromptLookup),
    "suffix": by_peer(lade.peers.Suffix),
    "adaptive": adaptive,
    "adaptive, prediction": lambda model, edit, size: adaptive(model, edit, size, edit.before),
}


def edits(tasks: Sequence[dict[str, Any]], tokenizer: Any, form: Callable[[str, str], str]) -> Iterator[Edit]:
    """Yield the tasks whose answer is not empty."""

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return encoded

    for task in tasks:
        answer = form(task["input"], task["output"])
        if answer and task["input"]:
            prompt = f"{task['instruction']}\n{task.get('context', '')}\n```python\n{task['input']}\n```\n\n"
            yield Edit(ids(prompt), ids(f"```python\n{task['input']}\n```"), ids(answer))


def replayed(found: Sequence[Edit], load: Callable[[], Any]) -> dict[tuple[int, str], list[lade.Stats]]:
    """Return the figures of every task by size and method.

    Each method gets a model of its own: what is learned of an MTP layer stays with the model, and would make the
    figures depend on the order of the methods.
    """
    figures = dict[tuple[int, str], list[lade.Stats]]()
    for size in SIZES:
        for name, method in METHODS.items():
            model = load()
            figures[size, name] = [method(model, edit, size) for edit in found]
    return figures


def summary(stats: dict[tuple[int, str], list[lade.Stats]]) -> list[dict[str, Any]]:
    """Return a row of the table by size and method: tokens per step over all tasks, and how often it is best."""
    made = list[dict[str, Any]]()
    for (size, name), figures in stats.items():
        others = zip(*(stats[size, other] for other in METHODS), strict=True)
        best = [max(each.tokens_per_step for each in of_task) for of_task in others]
        wins = sum(each.tokens_per_step == most for each, most in zip(figures, best, strict=True))
        total = lade.Stats()
        for each in figures:
            total.merge(each)
        row = {"size": size, "method": name, "tokens per step": total.tokens_per_step, "best in": wins}
        sums = {"fed": total.fed_tokens / total.steps, "tokens": total.new_tokens, "steps": total.steps}
        made.append({**row, **sums, "tasks": len(figures)})
    return made


def rows(model: str, data: Path, limit: int) -> list[dict[str, Any]]:
    """Return the rows of the table for the first tasks of `data/edit_eval.jsonl`, see `read_model`."""
    _, tokenizer = read_model(model)
    tasks = [json.loads(line) for line in (data / "edit_eval.jsonl").read_text().splitlines()[:limit]]
    made = list[dict[str, Any]]()
    for name, form in FORMS.items():
        found = list(edits(tasks, tokenizer, form))
        longest = max(len(edit.prompt) + len(edit.answer) for edit in found)
        made += [{"form": name, **row} for row in summary(replayed(found, partial(without_end, model, longest)))]
    return made


def main(
    data: Annotated[Path, typer.Option(help="folder with edit_eval.jsonl")],
    model: Annotated[str, typer.Option(help="folder, hub id or GGUF file")] = str(model_path()),
    limit: int = 97,
    output: Annotated[Path | None, typer.Option("--json", help="file for the figures")] = None,
) -> None:
    made = rows(model, data, limit)
    print(table(["form", "size", "method", "tokens per step", "fed", "best in", "tasks", "tokens"], made))
    if output is not None:
        output.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

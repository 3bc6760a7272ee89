"""Which of transformers' classes are served, by trying each: `python scripts/list_models.py docs/models.md`.

Every class that transformers maps to a configuration for text, or for images and text, is built tiny; `lade.supports`
is asked, and where it says yes, a text is decoded with token trees and compared with that of `model.generate`. What
came of it stands between two markers of the page.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

import lade

BEGIN, END = "<!-- written by scripts/list_models.py: begin -->", "<!-- end -->"
SERVED, NOT_BUILT, NOT_DECODED, DIFFERS = "served", "not built: ", "not decoded: ", "DIFFERS from plain decoding"
MAPPINGS = {
    "Text": MODEL_FOR_CAUSAL_LM_MAPPING,
    "Images and text, asked with text alone": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
}
PROMPT, NEW_TOKENS = 12, 12
"""Tokens; together beyond a tiny model's window."""
LOOKAHEAD = lade.LookaheadConfig(budget=8)
LONGEST_WORDS = 90


def main() -> None:
    """Write the part of the page that is generated."""
    page = Path(sys.argv[1])
    page.write_text(with_tables(page.read_text(encoding="utf-8"), tables()), encoding="utf-8")


def with_tables(text: str, new: str) -> str:
    """A page with other text between the markers."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{rest.partition(END)[2]}"


def tables() -> str:
    """The part of the page."""
    sections = [f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}."]
    known: dict[type, str] = {}
    for title, mapping in MAPPINGS.items():
        found: dict[str, str] = {}
        for model_type, config_class, cls in classes(mapping):
            if cls not in known:
                known[cls] = outcome(config_class, cls)
            found[model_type] = known[cls]
        sections.append(section(title, found))
    return "\n\n".join(sections)


def classes(mapping: Any) -> Iterator[tuple[str, Any, Any]]:
    """`(model_type, class of the configuration, class of the model)` of a mapping, by name."""
    names = mapping._model_mapping
    for model_type in sorted(names):
        config_class = CONFIG_MAPPING[model_type]
        entry = mapping[config_class]
        yield model_type, config_class, entry[0] if isinstance(entry, tuple) else entry


def outcome(config_class: Any, cls: Any) -> str:
    """Return the outcome for a class: `SERVED`, the reason of a refusal, or what kept it from being tried."""
    try:
        model = tiny_models.tiny_model(cls, tiny_models.tiny_config(config_class))
    except Exception as problem:  # noqa: BLE001 - of any class, and whatever it is
        return NOT_BUILT + first_line(problem)
    try:
        return tried(model)
    except Exception as problem:  # noqa: BLE001 - likewise
        return NOT_DECODED + first_line(problem)


def tried(model: Any) -> str:
    """Return the outcome for a model: `SERVED`, or the reason of a refusal."""
    arguments = {"input_ids": prompt(), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    support = lade.supports(model)
    fails = "Error" in support.reason  # perhaps in plain decoding, too
    if support or fails:
        expected = model.generate(**arguments)
    if not support:
        return re.sub(r" by [\d.]+ standard deviations", "", support.reason)
    try:
        ours = lade.generate(model, lookahead=LOOKAHEAD, **arguments)
    except lade.UnsupportedArgumentError as problem:
        return problem.reason
    return SERVED if torch.equal(ours, expected) else DIFFERS


def prompt() -> torch.Tensor:
    """`[1, L]`, with repetitions."""
    return torch.tensor([([5, 9, 17, 23] * PROMPT)[:PROMPT]])


def first_line(problem: Exception) -> str:
    """Type and first line of an error, without what differs from run to run."""
    words = next((line for line in str(problem.__cause__ or problem).splitlines() if line.strip()), "")
    words = re.sub(r"0x[0-9a-f]+", "...", words.replace("|", "/").replace("`", "'"))
    return f"{type(problem).__name__}: {words}".strip()[:LONGEST_WORDS].strip()


def section(title: str, found: dict[str, str]) -> str:
    """Heading, what is served, and a table of the rest by reason, without the errors of what could not be tried."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for model_type, what in found.items():
        untried = what.startswith((NOT_BUILT, NOT_DECODED))
        by_reason[what.partition(":")[0] if untried else what].append(f"`{model_type}`")
    served = by_reason.pop(SERVED, [])
    rows = sorted(by_reason.items(), key=lambda item: (item[0].startswith("not "), item[0]))
    table = "\n".join(f"| {', '.join(names)} | {cell(reason)} |" for reason, names in rows)
    return (
        f"### {title}\n\n**Served, {len(served)} of {len(found)}**: {', '.join(served)}.\n\n"
        f"| `model_type` | refused, or not tried |\n|---|---|\n{table}"
    )


def cell(reason: str) -> str:
    """A reason as a cell of a table."""
    return reason.replace("|", "/").replace("<", "&lt;").replace("\n", " ")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()

"""Draw a real answer with the tokens of each forward pass in one colour, as the README shows it.

    python scripts/draw_output.py docs/images

The model of `lade demo`, SmolLM2-135M-Instruct, answers the demo's second question twice, by `model.generate` and by
`lade.stream`; nothing is drawn unless both texts are the same. Colours follow the shell's: several tokens from one pass
alternate between two.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import platformdirs
import torch
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

import lade
from lade.cli.demo import QUESTIONS, fetched
from lade.cli.terminal import SAYS_ALL, Terminal

QUESTION = QUESTIONS[1]
TOKENS, WIDTH = 131, 76
COLOURS = "#1f6feb", "#bc4c00"
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>{styles}
text {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px; white-space: pre }}
</style>
<rect width="100%" height="100%" rx="8" fill="#f6f8fa"/>
<g transform="translate(12, 8)">{matrix}</g>
</svg>
"""


def main(folder: Path) -> None:
    """Write `output.svg` into the folder.

    Raises:
        SystemExit: the model cannot be fetched, or the two texts differ.
    """
    file, about = fetched(platformdirs.user_cache_path("lade") / "demo", Terminal(SAYS_ALL))
    if file is None:
        raise SystemExit(f"the picture is of SmolLM2's answer, not of {about}")
    model, tokenizer = lade.load_gguf(file)
    lade.invariant(model)  # so that a pass over several tokens rounds as one over a single token does
    chat = [{"role": "user", "content": QUESTION}]
    prompt = torch.tensor([tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)])
    asked = {"max_new_tokens": TOKENS, "do_sample": False}
    plain = model.generate(prompt, **asked)[0, prompt.shape[1] :].tolist()
    # One size, so that the picture does not depend on a clock.
    steps = list(lade.stream(model, prompt, **asked, lookahead=lade.LookaheadConfig(budget=16)))
    if [token for step in steps for token in step.tokens] != plain:
        raise SystemExit("the text differs from model.generate's")
    text, several, written = Text.assemble((f"{QUESTION}\n", "#8c959f")), 0, list[int]()
    for step in steps:
        before = tokenizer.decode(written, skip_special_tokens=True)
        written += step.tokens
        several += len(step.tokens) > 1
        style = f"bold {COLOURS[several % 2]}" if len(step.tokens) > 1 else ""
        text.append(tokenizer.decode(written, skip_special_tokens=True)[len(before) :], style)
    text.append(f"\n\n{len(written)} tokens in {len(steps)} forward passes", "bold")
    text.append(", the same tokens as model.generate's", "bold")
    console = Console(record=True, width=WIDTH, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(text)
    theme = TerminalTheme((246, 248, 250), (36, 41, 47), [(36, 41, 47)] * 8)
    svg = console.export_svg(title="", code_format=_SVG, unique_id="output", theme=theme)
    (folder / "output.svg").write_text(re.sub(r"<text[^>]*>\n</text>", "", svg), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))

"""Draw a real answer with the tokens of each forward pass in one colour, as the README shows it.

    python scripts/draw_output.py docs/images

The embedded model continues a prompt twice, by `model.generate` and by `lade.stream`; nothing is drawn unless both
texts are the same. Colours follow the shell's: several tokens from one pass alternate between two.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.embedded.files import model_path, prompts

PROMPT = prompts()[2]
TOKENS, WIDTH = 90, 76
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
        SystemExit: the two texts differ.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path()).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    plain = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0, inputs.input_ids.shape[1] :].tolist()
    # One size, so that the picture does not depend on a clock; and no MTP layer, which most models lack.
    config = lade.LookaheadConfig(budget=16, mtp=False)
    steps = list(lade.stream(model, **inputs, max_new_tokens=TOKENS, do_sample=False, lookahead=config))
    if [token for step in steps for token in step.tokens] != plain:
        raise SystemExit("the text differs from model.generate's")
    text, several, written = Text.assemble((PROMPT, "#8c959f")), 0, list[int]()
    for step in steps:
        before = tokenizer.decode(written)
        written += step.tokens
        several += len(step.tokens) > 1
        style = f"bold {COLOURS[several % 2]}" if len(step.tokens) > 1 else ""
        text.append(tokenizer.decode(written)[len(before) :], style)
    text.append(f"\n\n{len(written)} tokens in {len(steps)} forward passes", "bold")
    text.append(", the same tokens as model.generate's", "bold")
    console = Console(record=True, width=WIDTH, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(text)
    theme = TerminalTheme((246, 248, 250), (36, 41, 47), [(36, 41, 47)] * 8)
    svg = console.export_svg(title="", code_format=_SVG, unique_id="output", theme=theme)
    (folder / "output.svg").write_text(re.sub(r"<text[^>]*>\n</text>", "", svg), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))

"""Check the built documentation: examples are code, signatures are broken into lines, nothing is loaded from elsewhere.

Run by `make docs`. A strict build passes whatever Markdown makes of a text, so the pages themselves are read.

    python scripts/check_site.py build/site
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_CODE = re.compile(r"<(pre|code)\b.*?</\1>", re.DOTALL)
_NESTED = re.compile(r"<blockquote>\s*<blockquote>")
_LOADED = re.compile(
    r'<(?:link|script|img|iframe)\b(?![^>]*rel="?(?:canonical|alternate))[^>]*(?:src|href)="?(https?:[^"\s>]+)'
)
_LONGEST_LINE = 120


def faults(html: str) -> list[str]:
    """Return what is wrong with a page, in words.

    Args:
        html: text of the page.
    """
    prose = _CODE.sub("", html)
    found = ["an example rendered as nested quotations"] * len(_NESTED.findall(prose))
    found += ["a prompt >>> outside of code"] * prose.count("&gt;&gt;&gt;")
    found += [f"{url} is loaded from elsewhere" for url in _LOADED.findall(html)]
    signatures = re.findall(r'<div class="doc-signature highlight">(.*?)</div>', html, re.DOTALL)
    functions = len(re.findall(r'class="doc doc-object doc-function"', html))
    if len(signatures) < functions:  # one for each overload
        found += [f"{len(signatures)} signatures in blocks of their own for {functions} functions"]
    for each in signatures:
        lines = re.sub(r"<[^>]+>", "", each).split("\n")
        found += [f"a signature of {len(line)} characters on one line" for line in lines if len(line) > _LONGEST_LINE]
    return found


def main(site: Path) -> int:
    """Print each fault with its page; return the exit code."""
    pages = sorted(site.rglob("*.html"))
    found = [(page, fault) for page in pages for fault in faults(page.read_text(encoding="utf-8"))]
    for page, fault in found:
        print(f"{page.relative_to(site)}: {fault}")
    if not pages:
        print(f"{site} has no pages")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Print a page with its relative links made absolute: an index of packages shows the README without the repository.

For example:

    python scripts/absolute_links.py README.md https://github.com/OWNER/REPOSITORY v0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?P<target>[^)\s]+)\)")


def absolute(text: str, repository: str, ref: str) -> str:
    """Return Markdown whose relative links lead into a repository; pictures lead to the files themselves.

    Args:
        text: of the page, which lies at the root of the repository.
        repository: its address, such as `https://github.com/OWNER/REPOSITORY`.
        ref: tag, branch or commit.
    """

    def moved(found: re.Match[str]) -> str:
        target = found["target"]
        if not re.match(r"[a-z]+:|#", target):
            target = f"{repository.rstrip('/')}/{'raw' if found['image'] else 'blob'}/{ref}/{target}"
        return f"{found['image']}[{found['text']}]({target})"

    return _LINK.sub(moved, text)


if __name__ == "__main__":
    page, address, wanted = sys.argv[1:]
    sys.stdout.write(absolute(Path(page).read_text(encoding="utf-8"), address, wanted))

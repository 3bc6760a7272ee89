"""What a process takes, by `/proc`: memory, descriptors, threads and processor time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_FIELD = re.compile(r"(VmRSS|RssAnon|Threads):\s*(\d+)")


class Usage(NamedTuple):
    """What a process takes now; RSS is with what it shares, processor time that of all threads that live."""

    rss_mb: float
    anonymous_mb: float
    descriptors: int
    threads: int
    processor_s: float


def usage(pid: int) -> Usage:
    """Read it (Linux)."""
    folder = Path(f"/proc/{pid}")
    found = {name: int(value) for name, value in _FIELD.findall((folder / "status").read_text())}
    descriptors = sum(1 for _ in (folder / "fd").iterdir())
    rss, anonymous = (found[name] * 1024 / 1e6 for name in ("VmRSS", "RssAnon"))
    return Usage(rss, anonymous, descriptors, found["Threads"], processor_s(pid))


def processor_s(pid: int) -> float:
    """Processor time of the threads that live; the clock of `stat` has ticks of 10 ms, this one of nanoseconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return total / 1e9

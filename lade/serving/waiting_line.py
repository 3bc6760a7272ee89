"""The requests that wait for a seat, in the order in which they get one."""

from __future__ import annotations

from collections import deque

from lade.serving.handle import Handle
from lade.serving.request import Request

Entry = tuple[Request, Handle]


class WaitingLine:
    """One line for each scope, which are served in turn; within a scope who came first is served first.

    So a user with a hundred requests does not hold up another one with a single one.
    """

    def __init__(self) -> None:
        self._lines: dict[str | None, deque[Entry]] = {}  # none empty; the first one is next

    def __len__(self) -> int:
        return sum(map(len, list(self._lines.values())))

    @property
    def first(self) -> Request:
        """The one that is served next, of at least one."""
        return next(iter(self._lines.values()))[0][0]

    def add(self, request: Request, handle: Handle) -> None:
        """Append a request to the line of its scope; a new line is served after the others."""
        self._lines.setdefault(request.scope, deque()).append((request, handle))

    def pop(self) -> Entry:
        """Remove and return the one that is served next."""
        scope = next(iter(self._lines))
        line = self._lines.pop(scope)
        entry = line.popleft()
        if line:
            self._lines[scope] = line
        return entry

    def remove(self, handle: Handle) -> None:
        """Remove a request."""
        for scope, line in self._lines.items():
            rest = deque(entry for entry in line if entry[1] is not handle)
            if len(rest) < len(line):
                self._lines[scope] = rest
                if not rest:
                    del self._lines[scope]
                return

    def clear(self) -> list[Handle]:
        """Remove all, and return their handles."""
        handles = [handle for line in self._lines.values() for _, handle in line]
        self._lines.clear()
        return handles

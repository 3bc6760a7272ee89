"""The requests that wait for a seat, in the order in which they get one."""

from __future__ import annotations

from collections import deque

from lade.serving.handle import Handle
from lade.serving.request import Request

Entry = tuple[Request, Handle]


class WaitingLine:
    """One line for each client, which are served in turn; of one client's requests the first one is served first.

    So a client with a hundred requests does not hold up another with a single one.
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
        """Append a request to the line of its client; a new line is served after the others."""
        self._lines.setdefault(request.client, deque()).append((request, handle))

    def pop(self) -> Entry:
        """Remove and return the one that is served next."""
        client = next(iter(self._lines))
        line = self._lines.pop(client)
        entry = line.popleft()
        if line:
            self._lines[client] = line
        return entry

    def remove(self, handle: Handle) -> None:
        """Remove a request."""
        for client, line in self._lines.items():
            rest = deque(entry for entry in line if entry[1] is not handle)
            if len(rest) < len(line):
                self._lines[client] = rest
                if not rest:
                    del self._lines[client]
                return

    def clear(self) -> list[Handle]:
        """Remove all, and return their handles."""
        handles = [handle for line in self._lines.values() for _, handle in line]
        self._lines.clear()
        return handles

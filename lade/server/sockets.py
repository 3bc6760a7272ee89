"""The socket that a server listens on: open before anything that takes long is imported or loaded."""

from __future__ import annotations

import socket

from lade.errors import InputError

_BACKLOG = 2048


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any free one.

    Raises:
        InputError: the address is taken, or none of this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError(f"cannot listen on {host}:{port}: {reason}; give another --host or --port") from problem


def url_of(host: str, listening: socket.socket) -> str:
    """Where a browser on this machine finds it."""
    port = listening.getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"

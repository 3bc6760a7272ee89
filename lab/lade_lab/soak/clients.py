"""Clients that send requests at a moderate rate, and hold when a sample is taken."""

from __future__ import annotations

import hashlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lade_lab.live_server import JSON, BrokenAnswerError, Client, Reply, answer_of
from lade_lab.soak.requests import Request, pick

TIMEOUT_S = 120.0
_SMALL = 2048
"""Bytes of a slow reader's buffer, and of what it takes at a time."""


@dataclass
class Account:
    """What came of all requests so far.

    Attributes:
        kinds: requests by kind.
        lost: requests without the answer or refusal that is due.
        different: answers that are not those of the same request before.
        compared: answers that were compared.
        seconds: times of the answers since the last sample.
        first: digest of the first answer to each request that comes again.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    different: int = 0
    compared: int = 0
    seconds: list[float] = field(default_factory=list)
    first: dict[str, str] = field(default_factory=dict)


class Gate:
    """Lets clients send, or holds them until none of their requests is in progress."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open, self._inside, self.ended = True, 0, False

    @contextmanager
    def passed(self) -> Iterator[bool]:
        """Wait until it is open; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or self.ended)
            sending = not self.ended
            self._inside += sending
        try:
            yield sending
        finally:
            with self._changed:
                self._inside -= sending
                self._changed.notify_all()

    def hold(self, timeout_s: float = 2 * TIMEOUT_S) -> None:
        """Close it, and wait until nobody is inside."""
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: not self._inside, timeout_s)

    def open(self) -> None:
        """Let the clients send again."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def end(self) -> None:
        """Send the clients home."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()


class Clients:
    """Threads that send mixed requests."""

    def __init__(self, url: str, count: int, rate: float, seed: int, tell: Callable[[dict[str, Any]], None]) -> None:
        self.account, self.gate = Account(), Gate()
        self._url, self._pause_s, self._tell, self._lock = url, count / rate, tell, threading.Lock()
        self._numbers = iter(range(10**12))
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed + own),), daemon=True) for own in range(count)
        ]

    def start(self) -> None:
        """Let them begin."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let them finish what they do, and end."""
        self.gate.end()
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def _run(self, rng: random.Random) -> None:
        client = Client(self._url, TIMEOUT_S)
        while not self.gate.ended:
            with self.gate.passed() as sending:
                if sending:
                    with self._lock:
                        number = next(self._numbers)
                    self._send(client, rng, *pick(rng, number))
            if rng.random() < 0.2:
                client.close()
            time.sleep(min(5 * self._pause_s, rng.expovariate(1 / self._pause_s)))
        client.close()

    def _send(self, client: Client, rng: random.Random, name: str, request: Request) -> None:
        try:
            match request.manner:
                case "churn":
                    _churn(client, rng)
                    reply = None
                case "left":
                    _leave(self._url, request, rng.uniform(0.0, 0.6))
                    reply = None
                case "slow":
                    reply = _read_slowly(self._url, request)
                case _:
                    reply = client.post(request.path, request.body)
            found = None if reply is None else _digest(request, reply)
        except (OSError, ValueError, BrokenAnswerError) as problem:
            with self._lock:
                self.account.kinds[request.kind] += 1
                self.account.lost += 1
            self._tell({"kind": "lost", "request": name, "why": f"{type(problem).__name__}: {problem}"})
            return
        with self._lock:
            self._count(name, request, reply, found)

    def _count(self, name: str, request: Request, reply: Reply | None, found: str | None) -> None:
        own = self.account
        own.kinds[request.kind] += 1
        if reply is not None and reply.status == 200 and request.manner == "whole":
            own.seconds.append(reply.seconds)
        if found is None:
            return
        first = own.first.get(name)
        if first is None:
            if int(name.rpartition(" ")[2]) < 10**3:  # those of larger numbers do not come again
                own.first[name] = found
            return
        own.compared += 1
        if first != found:
            own.different += 1
            self._tell({"kind": "different", "request": name})


def _digest(request: Request, reply: Reply) -> str | None:
    """Return a digest of the answer; None where there is none to compare."""
    if reply.status not in request.statuses:
        raise BrokenAnswerError(f"status {reply.status}: {reply.body[:300]!r}")
    if not request.answered:
        return None
    return hashlib.sha256(json.dumps(answer_of(request.path, reply)).encode()).hexdigest()


def _churn(client: Client, rng: random.Random) -> None:
    place = client.connection.host, client.connection.port
    for _ in range(8):
        with socket.create_connection(place, TIMEOUT_S) as connection:
            if rng.random() < 0.5:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")


def _begun(url: str, request: Request) -> Client:
    assert isinstance(request.body, dict)
    client = Client(url, TIMEOUT_S)
    client.connection.connect()
    client.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
    client.connection.request("POST", request.path, json.dumps(request.body).encode(), dict(JSON))
    return client


def _leave(url: str, request: Request, after_s: float) -> None:
    client = _begun(url, request)
    time.sleep(after_s)
    client.close()


def _read_slowly(url: str, request: Request) -> Reply:
    client, start, body = _begun(url, request), time.perf_counter(), b""
    try:
        response = client.connection.getresponse()
        while piece := response.read1(_SMALL):
            body += piece
            time.sleep(0.05)
        kind = {"content-type": response.headers["content-type"]}
        return Reply(response.status, body, kind, time.perf_counter() - start)
    finally:
        client.close()

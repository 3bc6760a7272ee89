"""A client that leaves before it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request

T = TypeVar("T")


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What comes of some work, unless the client leaves before; nobody else notices that it does.

    Raises:
        ClientLeftError: it has left.
    """
    tasks: Sequence[asyncio.Task[Any]] = (asyncio.create_task(work), asyncio.create_task(_gone(request)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            result: T = tasks[0].result()
            return result
        raise ClientLeftError
    finally:
        for task in tasks:
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

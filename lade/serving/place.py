"""A place in an engine's queue, taken before its request is prepared."""

from __future__ import annotations

from typing import Protocol

from lade.serving.handle import Handle


class Queue(Protocol):
    """What places are in."""

    def give_up(self, place: Place) -> Handle | None:
        """Free a place that no request has taken; returns the handle of the request that has, if one has."""
        ...


class Place:
    """One of the places that `Engine.reserve` gives out. All methods may be called from any thread.

    It counts as a waiting request from then on, so that whoever has one need not prepare a request in vain. At the end
    of the block a place that no request has taken is free again.

    >>> with engine.reserve() as place:
    ...     ids = tokenizer("Once upon a time").input_ids
    ...     handle = engine.add(ids, place=place, max_new_tokens=200)

    Attributes:
        handle: of the request that has taken it; None as long as none has.
        engine: the engine's queue, which it is in.
        released: whether it was given up before that: no request can take it any more.
    """

    def __init__(self, engine: Queue) -> None:
        self.engine = engine
        self.handle: Handle | None = None
        self.released = False

    def __repr__(self) -> str:
        state = "taken" if self.handle is not None else "released" if self.released else "free"
        return f"Place({state})"

    def release(self) -> None:
        """Give it up, unless a request has taken it. One that is being prepared then never begins."""
        self.engine.give_up(self)

    def cancel(self) -> None:
        """Give it up, or cancel the request that has taken it: whoever wanted it has left."""
        handle = self.engine.give_up(self)
        if handle is not None:
            handle.cancel()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *problem: object) -> None:
        self.release()

"""A call of a tool, read while a model writes it: `{"name": "add", "arguments": {"a": 1}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from lade.server.runs import Call, Parts, new_id

_MARKS = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
_SCALAR_END = re.compile(r"[\s,}\]]")
_Reading = Generator[None]
"""Goes on whenever there is more text, and ends behind what it reads."""


class CallText:
    """What is known of a call so far. Its arguments are told as they stand there, whatever JSON they are.

    Attributes:
        name: of the function; None until it is known.
        has_arguments: whether these have begun.
        ended: whether the object is whole.
        failed: whether the text is no call: no object, or one without a name. What comes then is not read.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_arguments = self.ended = self.failed = False
        self._rest, self._untold = "", ""
        self._reading = self._call()
        next(self._reading)

    def push(self, text: str) -> str:
        """What is new of the arguments with this text; nothing before the name is known."""
        if self.ended or self.failed:
            return ""
        self._rest += text
        try:
            next(self._reading)
        except StopIteration:
            self.ended = True
        except ValueError:
            self.failed = True
        if self.name is None:
            return ""
        told, self._untold = self._untold, ""
        return told

    def _call(self) -> _Reading:
        yield from self._take("{")
        while (yield from self._next()) != "}":
            key = yield from self._string()
            yield from self._take(":")
            if key == "arguments" and not self.has_arguments:
                yield from self._arguments()
            elif key == "name" and self.name is None:
                self.name = yield from self._string()
            else:
                yield from self._value(lambda _: None)
            if (yield from self._next()) != "}":
                yield from self._take(",")
        if self.name is None:
            raise ValueError("a call without a name is none")

    def _arguments(self) -> _Reading:
        """An object as it is written; of a text, as which some models write it, what it says when it is whole."""
        if (yield from self._next()) == "{":
            self.has_arguments = True
            yield from self._value(self._tell)
            return
        pieces = list[str]()
        yield from self._value(pieces.append)
        whole = "".join(pieces)
        said = json.loads(whole, strict=False)
        self.has_arguments = True
        self._tell(said if isinstance(said, str) else whole)

    def _tell(self, text: str) -> None:
        self._untold += text

    def _string(self) -> Generator[None, None, str]:
        pieces = list[str]()
        if (yield from self._next()) != '"':
            raise ValueError("a text is expected")
        yield from self._value(pieces.append)
        return str(json.loads("".join(pieces), strict=False))

    def _next(self) -> Generator[None, None, str]:
        """The next character that is no space; it stays where it is."""
        while not (rest := self._rest.lstrip()):
            self._rest = ""
            yield
        self._rest = rest
        return rest[0]

    def _take(self, mark: str) -> _Reading:
        if (yield from self._next()) != mark:
            raise ValueError(f"{mark} is expected")
        self._rest = self._rest[1:]

    def _value(self, take: Callable[[str], None]) -> _Reading:
        """Hand on a value of any kind, piece by piece as it comes."""
        if (yield from self._next()) not in '"{[':
            yield from self._scalar(take)
            return
        depth, quoted = 0, False
        while True:
            seen = 0
            for found in _MARKS.finditer(self._rest):
                mark, seen = found[0], found.end()
                if mark == '"':
                    quoted = not quoted
                elif not quoted:
                    depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(mark, 0)
                if depth <= 0 and not quoted:
                    self._hand_on(seen, take)
                    return
            half = self._rest.endswith("\\") and seen < len(self._rest)  # what it escapes has not come yet
            self._hand_on(len(self._rest) - half, take)
            yield

    def _scalar(self, take: Callable[[str], None]) -> _Reading:
        while True:
            found = _SCALAR_END.search(self._rest)
            self._hand_on(found.start() if found else len(self._rest), take)
            if self._rest:
                return
            yield

    def _hand_on(self, end: int, take: Callable[[str], None]) -> None:
        take(self._rest[:end])
        self._rest = self._rest[end:]


class WrittenCall:
    """A call while a model writes it, told as soon as its name is known and its arguments have begun.

    Args:
        index: its number among the calls of the answer.
        opening: the mark before it.
    """

    def __init__(self, index: int, opening: str) -> None:
        self._index, self._text = index, CallText()
        self._held: str | None = opening
        """What has not been told; None once a part of it has."""
        self._is_call = False

    def push(self, text: str) -> Parts:
        """What is new with this text, which is of the answer if it cannot be a call."""
        arguments = self._text.push(text)
        if self._held is None:
            more = self._is_call and arguments
            return Parts(tool_calls=[Call(self._index, arguments)]) if more else Parts("" if self._is_call else text)
        self._held += text
        if self._text.failed:
            return self._as_answer("")
        return self._begin(arguments) if self._text.name is not None and self._text.has_arguments else Parts()

    def close(self, closing: str, *, cut: bool) -> Parts:
        """What is new with its end.

        Args:
            closing: the mark behind it; "" where there is none.
            cut: whether the answer was cut off there, so that what cannot be told as a call is not told.
        """
        if self._held is None:
            return Parts() if self._is_call else Parts(closing)
        if self._text.ended:
            return self._begin("{}")
        if cut:
            return Parts() if self._text.name is None else self._begin("")
        return self._as_answer(closing)

    def _begin(self, arguments: str) -> Parts:
        self._held, self._is_call = None, True
        return Parts(tool_calls=[Call(self._index, arguments, new_id(), self._text.name or "")])

    def _as_answer(self, closing: str) -> Parts:
        held, self._held = self._held or "", None
        return Parts(held + closing)

"""Every exception of the library, as one tree.

LadeError
├── ConfigError             (ValueError)  a LookaheadConfig field is out of range
├── InputError              (ValueError)  a prompt, a file or an id that cannot be decoded
├── UnsupportedError        (ValueError)  what cannot be served exactly
│   ├── UnsupportedModelError             this model
│   └── UnsupportedArgumentError          this argument of generate()
├── ClusterError            (RuntimeError) processes that decode together have parted
├── EngineFullError         (RuntimeError) the waiting line of a `lade.Engine` is full
├── EngineClosedError       (RuntimeError) a `lade.Engine` takes no more requests
└── MissingExtraError       (ImportError) an optional dependency is not installed

A message names what was wrong, its value, and the remedy. Errors can be copied and pickled: a process pool sends them
to its parent.
"""

from __future__ import annotations

from typing import Any


class LadeError(Exception):
    """Base of all errors raised by this library."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Python's own way calls `__init__` with the finished message, whatever arguments it takes."""
        return _rebuilt, (type(self), self.args), self.__dict__


class ConfigError(LadeError, ValueError):
    """A field of `LookaheadConfig`, or another setting, is out of range."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field}={value!r} is not valid: {remedy}")
        self.field, self.value, self.remedy = field, value, remedy


class InputError(LadeError, ValueError):
    """A prompt, a file or token ids that cannot be decoded."""


class UnsupportedError(LadeError, ValueError):
    """What cannot be decoded exactly, and what to do about it.

    Attributes:
        reason: the first half of the message, without the remedy.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


class UnsupportedModelError(UnsupportedError):
    """The model cannot be decoded exactly with a token tree."""


class UnsupportedArgumentError(UnsupportedError):
    """An argument of `generate` that lookahead decoding does not serve."""


class ClusterError(LadeError, RuntimeError):
    """Processes that decode together differ, or one of them has gone."""


class EngineFullError(LadeError, RuntimeError):
    """The waiting line of an engine is full."""


class EngineClosedError(LadeError, RuntimeError):
    """An engine that was closed, or that another process decodes for, takes no more requests."""


class MissingExtraError(LadeError, ImportError):
    """An optional dependency is missing; the message is the command that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f'{package} is not installed: run  pip install "lookahead-decoding[{extra}]"')


class FallbackWarning(UserWarning):
    """`lookahead="auto"` could not serve a model or an argument and decodes plainly."""


class PrecisionWarning(UserWarning):
    """A model in 16 bits that is not invariant is accelerated; said once for each model.

    Passes over several tokens round otherwise than passes over one. So where two tokens score almost equally, the
    output may differ from that of plain `model.generate`.
    """


class CaptureWarning(UserWarning):
    """A pass cannot be captured as a CUDA graph, or there is no memory for that: passes are launched kernel by kernel.

    That is slower; the tokens are the same.
    """


def _rebuilt(kind: type[LadeError], args: tuple[Any, ...]) -> LadeError:
    """An error with these `args`, made without its own `__init__`; unpickling sets its attributes."""
    error: LadeError = kind.__new__(kind, *args)
    super(LadeError, error).__init__(*args)
    return error

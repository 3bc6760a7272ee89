"""The library's exception hierarchy.

LadeError
├── ConfigError             (ValueError)  a setting is out of range
├── InputError              (ValueError)  a prompt, file or token id that cannot be decoded
├── UnsupportedError        (ValueError)  cannot be served exactly
│   ├── UnsupportedModelError             because of the model
│   └── UnsupportedArgumentError          because of an argument of generate()
├── DrafterError            (RuntimeError) a `lade.Drafter` has failed
├── ClusterError            (RuntimeError) processes that decode together have diverged
├── EngineFullError         (RuntimeError) the queue of a `lade.Engine` is full
├── EngineClosedError       (RuntimeError) a `lade.Engine` takes no more requests
└── MissingExtraError       (ImportError) an optional dependency is not installed

Each message names the cause, the offending value and the remedy. Errors can be copied and pickled, as process pools
require.
"""

from __future__ import annotations

from typing import Any


class LadeError(Exception):
    """Base class of all errors raised by this library."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by `args`: the default would call `__init__` with the finished message, whatever parameters it has."""
        return _rebuilt, (type(self), self.args), self.__dict__


class ConfigError(LadeError, ValueError):
    """A field of `LookaheadConfig`, or another setting, is out of range."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field}={value!r} is not valid: {remedy}")
        self.field, self.value, self.remedy = field, value, remedy


def whole_number(field: str, value: Any, least: int, most: int | None = None, *, of: str = "", note: str = "") -> int:
    """Return the value of a setting that has to be a whole number within limits, which True and False are not.

    Raises:
        ConfigError: the value is anything else; the message says what is counted, such as " of bytes", and ends with
            the note.
    """
    if isinstance(value, int) and not isinstance(value, bool) and least <= value and (most is None or value <= most):
        return value
    limit = "" if most is None else f" and <= {most}"
    raise ConfigError(field, value, f"give a whole number{of} >= {least}{limit}{note}")


class InputError(LadeError, ValueError):
    """A prompt, a file or token ids that cannot be decoded."""


class UnsupportedError(LadeError, ValueError):
    """A request that cannot be served exactly.

    Attributes:
        reason: the first half of the message, without the remedy.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


class UnsupportedModelError(UnsupportedError):
    """The model cannot be decoded exactly with a token tree."""


class UnsupportedArgumentError(UnsupportedError):
    """An argument of `generate` that lookahead decoding does not support."""


class DrafterError(LadeError, RuntimeError):
    """A `lade.Drafter` raised an exception, which is the `__cause__`, or proposed what is not a token id."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"the drafter {name} failed: {problem}; fix it, or leave it out of sources=[...]")
        self.name, self.problem = name, problem


class ClusterError(LadeError, RuntimeError):
    """Processes that decode together have diverged, or one of them is gone."""


class EngineFullError(LadeError, RuntimeError):
    """The queue of an engine is full."""


class EngineClosedError(LadeError, RuntimeError):
    """The engine was closed or serves another process, and takes no more requests."""


class MissingExtraError(LadeError, ImportError):
    """An optional dependency is missing; the message is the command that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: in the checkout of lade, run  pip install '.[{extra}]'")


class FallbackWarning(UserWarning):
    """With `lookahead="auto"`, decoding falls back to plain; issued once per model and reason."""


class PrecisionWarning(UserWarning):
    """A 16-bit model is accelerated that is not batch-invariant; issued once per model.

    A forward pass over several tokens rounds differently from a pass over one. So where two tokens have almost equal
    logits, the output may differ from that of plain `model.generate`.
    """


class CaptureWarning(UserWarning):
    """A pass cannot be captured as a CUDA graph, or memory is too short: its kernels are launched eagerly.

    Decoding is slower; the tokens are the same.
    """


def _rebuilt(kind: type[LadeError], args: tuple[Any, ...]) -> LadeError:
    """Unpickle an error without calling its own `__init__`; its attributes are restored afterwards."""
    error: LadeError = kind.__new__(kind, *args)
    super(LadeError, error).__init__(*args)
    return error

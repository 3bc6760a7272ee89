"""Options that several commands share, and what they mean together."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lade.config import LookaheadConfig
from lade.errors import ConfigError

METHODS = ("plain", "lookahead", "auto")

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="FOLDER_OR_HUB_ID", help="Model to load. Not given: the embedded one."),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="float32, bfloat16, float16, float64, or auto: as in the checkpoint (the embedded model: float32).",
    ),
]
Device = Annotated[
    str,
    typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, mps, ..., or auto: CUDA if it is there, else the CPU."),
]
Method = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(METHODS),
        help="auto, the default: lookahead, or plain decoding with a warning where a model cannot be served.",
    ),
]
Window = Annotated[int | None, typer.Option(metavar="W", help="Columns of the lookahead window. Implies lookahead.")]
Ngram = Annotated[int | None, typer.Option(metavar="N", help="Length of the n-grams. Implies lookahead.")]
Guesses = Annotated[int | None, typer.Option(metavar="G", help="Guesses verified in a step. Implies lookahead.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", metavar="N", help="Tokens to generate at most.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks, warnings and transformers' own messages.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colours. NO_COLOR in the environment does it too.")]


def lookahead_of(
    method: str | None, window: int | None, ngram: int | None, guesses: int | None
) -> LookaheadConfig | str | None:
    """What `--method`, `--window`, `--ngram` and `--guesses` ask for, as the library's `lookahead=`.

    Raises:
        ConfigError: unknown method, a size out of range, or sizes given for plain decoding.
    """
    given = {"window": window, "ngram": ngram, "guesses": guesses}
    sizes: dict[str, Any] = {name: size for name, size in given.items() if size is not None}
    if method not in (*METHODS, None):
        raise ConfigError("method", method, f"give one of {', '.join(METHODS)}")
    if method == "plain" and sizes:
        listed = " ".join(f"--{name} {size}" for name, size in sizes.items())
        raise ConfigError("method", method, f"plain decoding has no {listed}: leave out --method, or the sizes")
    if method == "plain":
        return None
    return LookaheadConfig(**sizes) if sizes or method == "lookahead" else "auto"


def check_max_new_tokens(max_new_tokens: int) -> None:
    """Raise `ConfigError` unless there is at least one token to generate."""
    if max_new_tokens < 1:
        raise ConfigError("max-new-tokens", max_new_tokens, "give a whole number >= 1")

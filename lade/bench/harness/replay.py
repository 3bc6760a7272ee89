"""One answer step by step, as text that people can watch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lade.bench.harness.completion import Completion, Place
from lade.bench.results import Replay

_INCOMPLETE = "\ufffd"  # what tokenizers make of a character whose last bytes have not come yet
_CONTEXT_TOKENS = 8


def replay_of(place: Place, method: str, prompt: Sequence[int], completion: Completion, tokenizer: Any) -> Replay:
    """The record of an answer of one of this library's methods.

    Args:
        place: which answer.
        method: name of the method that gave it.
        prompt: ids.
        completion: with its steps.
        tokenizer: of the model.
    """
    pieces = iter(pieces_of(completion.tokens, prompt, tokenizer))
    steps = [
        {
            "pieces": [next(pieces) for _ in step.tokens],
            "sources": list(step.sources),
            "fed": step.fed,
            "seconds": step.seconds,
        }
        for step in completion.steps
    ]
    return Replay(place.workload, place.prompt, method, steps)


def pieces_of(tokens: Sequence[int], prompt: Sequence[int], tokenizer: Any) -> list[str]:
    """The text of each token; joined they are the text of all of them.

    Whether a token begins with a space depends on those before it, so the text is decoded as a whole, and each token
    has what it adds. A character spread over tokens belongs to the last of them.
    """
    context = list(prompt)[-_CONTEXT_TOKENS:]
    shown, pieces = _decoded(context, tokenizer), list[str]()
    for number in range(1, len(tokens) + 1):
        text = _decoded([*context, *tokens[:number]], tokenizer)
        complete = text if number == len(tokens) else text.rstrip(_INCOMPLETE)
        pieces.append(complete[len(shown) :])
        shown = complete if len(complete) > len(shown) else shown
    return pieces


def _decoded(ids: list[int], tokenizer: Any) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text

"""The next piece of a request's text, fed as decoding it alone would have fed it.

A request that made room for others has its text fed again, prompt and answer. Decoding has fed the prompt at once and
the answer token by token, and some models tell; see `lade.model.prefill`. There the answer goes in as trees
without branches: what they give is what single tokens give, many to a pass.
"""

from __future__ import annotations

import torch

from lade.decoding.loop import prompt_hook
from lade.decoding.row import Row
from lade.decoding.tree import TokenTree
from lade.model.runner import EagerRunner
from lade.serving.active import ActiveRequest

_CHAIN = 64
"""Tokens of an answer in a pass, at most: what recurrent layers compute for a tree takes memory by its square."""


def feed_piece(active: ActiveRequest, row: Row, runner: EagerRunner, most: int) -> torch.Tensor:
    """Feed the next tokens of a text, some `most` at most; a prompt with images whole.

    Args:
        active: the request; its cache gets them.
        row: its row, which learns from the prompt.
        runner: feeds them.
        most: tokens to feed.

    Returns:
        Logits of the last token fed, `[1, V]`.
    """
    text, images, pieces = active.text, active.request.images, runner.pieces
    prompt = len(text) if pieces.anywhere else active.request.prompt_tokens
    if active.fed >= prompt:
        return _feed_chain(active, text[active.fed : active.fed + min(most, _CHAIN)], runner)
    hook = None if row.written else prompt_hook([row])
    feeding = runner.for_prompts(images)
    if (logprobs := active.prompt_logprobs) is not None:
        feeding, hook = feeding.with_all_logits(), logprobs.beside(hook)
        most = min(most, logprobs.piece_tokens)
    end = prompt if images else pieces.end(active.fed, most, prompt)
    if logprobs is not None:
        logprobs.check_piece(end - active.fed)
    logits = feeding.prefill([text[:end]], active.cache, hook)
    active.fed = end
    return logits


def _feed_chain(active: ActiveRequest, ids: list[int], runner: EagerRunner) -> torch.Tensor:
    """Feed tokens of an answer, as many of these as a tree may have here."""
    tree = TokenTree(ids[0], runner.room(active.fed))
    tree.add_path(ids[1:], "text")
    logits = runner.forward([tree], [active.text[: active.fed + 1]], active.cache)  # [1, S, V]
    active.cache.keep([range(len(tree))], logits.shape[1])
    active.fed += len(tree)
    return logits[:, len(tree) - 1]

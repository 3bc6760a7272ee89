"""What happens only once, before the first user waits for it: compilation, step costs, buffers."""

from __future__ import annotations

import gc
import logging

from lade.compilation import compile_all
from lade.decoding import kernels
from lade.server.served_model import ServedModel
from lade.server.settings import Settings
from lade.serving.engine import Engine

logger = logging.getLogger(__name__)

_TOKENS = 12


def warm_up(engine: Engine, model: ServedModel, settings: Settings) -> None:
    """Decode short texts: one alone, then as many together as there are rows.

    Batches of 1, 2, 4, ... rows have step costs of their own, which are measured once on a machine; a batch that grows
    while others wait would measure them amid their answers.

    Raises:
        Exception: the model cannot decode, for whatever reason: better now than with the first request.
    """
    compile_all(kernels)  # short texts may not come to all that is compiled
    ids = model.tokenizer("The")["input_ids"] or [0]
    rows = 1
    while rows <= settings.max_rows:
        logger.info("warming up with %d of %d rows", rows, settings.max_rows)
        # one after the other, so that the batch has had every size before
        handles = [
            engine.add(ids, lookahead=model.lookahead, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS)
            for _ in range(min(rows, settings.max_rows))
        ]
        for handle in handles:
            handle.result()
        rows *= 2
    # what is there now stays: Python's collector, which all threads wait for, would walk through it again and again
    gc.collect()
    gc.freeze()

"""A row of a batch whose tokens transformers' processors and criteria decide about."""

from __future__ import annotations

from transformers.generation.streamers import BaseStreamer

from lade.decoding.drafting.drafter import Drafter
from lade.decoding.row import Row, StopRule
from lade.decoding.verify import Chooser, Greedy
from lade.hf.batch_rules import processors_of_row
from lade.hf.encoder_decoder import source_of
from lade.hf.prepared import Prepared
from lade.hf.processors import Processed, Record, Streamed, Transcript
from lade.hf.sampling import Sampler
from lade.hf.stop_rules import StopRules
from lade.hf.tree_processors import AtOnce, Blind, can_be_asked_at_once, pays_at_once


def row_for(
    prepared: Prepared,
    number: int,
    text: list[int],
    drafter: Drafter,
    *,
    sampler: Sampler | None,
    record: Record,
    streamer: BaseStreamer | None = None,
) -> Row:
    """The row that writes the answer to one prompt of a batch.

    Args:
        prepared: the batch.
        number: the prompt's row in it.
        text: of the prompt; it has further columns where some are masked, and fewer where embeddings stand for ids.
        drafter: drafts for this row alone.
        sampler: draws its tokens; None for the argmax.
        record: gets scores and logits.
        streamer: gets each token.
    """
    prompt, rows = prepared.input_ids[number : number + 1], len(prepared.input_ids)
    processors = processors_of_row(prepared.logits_processor, number, rows)
    transcript = Transcript(prompt, prompt.shape[1] - len(text))
    chooser: Chooser = Greedy()
    if processors or sampler or record:
        make: type[Processed] = Processed
        if can_be_asked_at_once(processors) and not record:
            make = AtOnce if pays_at_once(prompt.device) else Blind
        chooser = make(processors, transcript, sampler=sampler, record=record)
    stop: StopRule = StopRules(prepared.stopping_criteria, transcript, record)
    if streamer is not None:
        stop = Streamed(stop, streamer)
    return Row(text, drafter, chooser, stop, source_of(prepared, number))

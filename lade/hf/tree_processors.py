"""Transformers' processors called for all nodes of a tree at once, and the draws made there, without a wait per token.

Node by node, each emitted token costs a dozen kernels and a wait for the device; on a GPU that is much of a small
model's step. Processors that do not read the text may as well be called for every node, reached or not, before
the host waits. On a CPU that would be work for nodes that are mostly rejected; there it is of use that such processors
need neither the text nor a copy of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from lade.decoding.verify import Choose
from lade.hf.processors import Processed, Record, Transcript
from lade.hf.sampling import NO_TOKEN, Sampler

BLIND_PROCESSORS = frozenset(
    """
    EpsilonLogitsWarper InfNanRemoveLogitsProcessor LogitNormalization MinPLogitsWarper SuppressTokensLogitsProcessor
    TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper TypicalLogitsWarper
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
)
"""Transformers' processors that make of each row what they would make of it alone, whatever the text, and that do not
wait for the device."""


def pays_at_once(device: torch.device) -> bool:
    """Whether a wait costs more there than processing all nodes; also, whether torch draws there as `draws` knows."""
    return device.type == "cuda"


def can_be_asked_at_once(processors: LogitsProcessorList) -> bool:
    """Whether all of them are `BLIND_PROCESSORS`."""
    return all(
        type(processor).__module__ == logits_process.__name__ and type(processor).__name__ in BLIND_PROCESSORS
        for processor in processors
    )


class Blind(Processed):
    """Calls processors that do not read the text without one, and with the logits as they are; see `Processed`."""

    def __init__(
        self, processors: LogitsProcessorList, transcript: Transcript, *, sampler: Sampler | None, record: Record
    ) -> None:
        super().__init__(processors, transcript, sampler=sampler, record=record)
        self._no_text = torch.empty((1, 0), dtype=torch.long, device=transcript.device)

    def _shown(self, logits: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """No text, `[1, 0]`, and float32 logits `[1, V]`, which none of these processors writes to."""
        return self._no_text, logits.to(dtype=torch.float32, device=self._no_text.device)


class AtOnce(Processed):
    """Makes the choices for all nodes of a step on the device; see `Processed`, whose tokens it emits.

    What was drawn ahead is taken only as it is emitted, so that torch's generator is where plain decoding has it
    whenever other code may read it.
    """

    _probabilities: torch.Tensor | None = None  # [S, V]

    def choose_all(self, logits: torch.Tensor, depths: Sequence[int]) -> torch.Tensor:
        """See `lade.decoding.verify.Chooser.choose_all`."""
        raw = logits.float()  # which none of these processors writes to
        no_text = torch.empty((len(raw), 0), dtype=torch.long, device=raw.device)
        scores = self._processors(no_text, raw)  # [S, V]
        if self._sampler is None:
            choices: torch.Tensor = scores.argmax(dim=-1)
            return choices
        self._probabilities = scores.softmax(dim=-1)
        return self._sampler.draw_ahead(self._probabilities, depths)

    def bind(self, logits: torch.Tensor, ids: Sequence[int], tokens: Sequence[int]) -> Choose:
        """See `lade.decoding.verify.Chooser.bind`."""
        sampler, probabilities = self._sampler, self._probabilities
        if sampler is None or probabilities is None:
            return ids.__getitem__

        def choose(node: int) -> int:
            if ids[node] == NO_TOKEN:
                return sampler.draw(probabilities[node : node + 1])  # which raises
            sampler.take()
            return ids[node]

        return choose

"""Drafts inside SGLang: an algorithm beside its NGRAM, whose worker verifies irregular trees. Not tried on a GPU.

    pip install examples/sglang_plugin
    python -m sglang.launch_server --model-path MODEL --speculative-algorithm LADE --speculative-num-draft-tokens 16

`register` is an entry point of `sglang.srt.plugins`, the group by which SGLang's processes learn of algorithms. The
worker is SGLang's own `NGRAMWorker` with a `Corpus` of ours, and a step of it goes:

    _prepare_draft_tokens       the corpus learns from the pass before, and drafts a tree for each request
    target_worker.forward_...   rows of logits at all nodes are packed on their device
    forward_batch_generation    what was accepted stays on its device until the corpus learns from it

Every tree has `--speculative-num-draft-tokens` nodes, the last token of the text included, so nodes have no price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sglang

from lade.errors import ConfigError, UnsupportedError

VERSIONS = ("0.5.23",)
"""Versions of SGLang whose interfaces this was written against."""
_COMPARED = 8  # tokens at a text's end by which it is known to be the one that was seen before
_TREE_TOKENS = 16  # of a request and step, unless --speculative-num-draft-tokens says otherwise
_MOST_REQUESTS = 48  # unless --max-running-requests says otherwise; SGLang's own number for NGRAM


class Corpus:
    """Drafts trees for an `NGRAMWorker`, through the methods of SGLang's `NgramCorpus`.

    Args:
        vocabulary: number of token ids of the model.
        excluded: ids that are never drafted.
        nodes: tokens of each tree, the last one of the text included.
        trees: whether drafts may branch.
        memory: a file made by `lade.Memory.save`; None to begin with an empty memory.

    Raises:
        ConfigError: an argument is out of range.
        InputError: the memory's file is damaged.
    """

    def __init__(
        self, vocabulary: int, excluded: Iterable[int], nodes: int, *, trees: bool = True, memory: str | None = None
    ) -> None:
        from lade.engines.drafter import EngineDrafter
        from lade.memory import Memory

        if nodes < 1:
            raise ConfigError("nodes", nodes, "give the tokens of a tree, at least 1")

        def drafter(memory: Memory | None) -> EngineDrafter:
            return EngineDrafter(vocabulary, tuple(excluded), memory=memory, trees=trees, price=0.0)

        self._nodes, self._fresh = nodes, drafter
        self.drafter = drafter(None if memory is None else Memory.load(memory))
        self._texts: Mapping[str, Any] = {}
        self._drafted: list[tuple[str, int]] = []
        self._packed: Any = None
        self._passed: tuple[list[tuple[str, int]], Any, Any] | None = None

    def expect(self, requests: Iterable[Any]) -> None:
        """Note the requests that `batch_get` is going to be called for: it is given the ends of their texts alone.

        Args:
            requests: SGLang's `Req`, with `rid`, `origin_input_ids_unpadded` and `output_ids`.
        """
        self._texts = {request.rid: request for request in requests}

    def note_logits(self, logits: Any) -> None:
        """Pack the rows of a pass on their device.

        Args:
            logits: `[B * N, V]`, at the nodes of the trees of the last `batch_get`, before penalties and grammars.
        """
        self._packed = self.drafter.pack_rows(logits)

    def note_accepted(self, tokens: Any, counts: Any) -> None:
        """Note what a pass yielded; `synchronize` learns from it. Without effect if the pass verified no trees.

        Args:
            tokens: `[B * N]` ids, a tensor: the first ones of each N are what the request got.
            counts: `[B]`, how many those are.
        """
        if self._packed is not None:
            self._passed = self._drafted, self._packed, (tokens, counts)
        self._packed = None

    def synchronize(self) -> None:
        """Learn from the last pass, whose device is waited for."""
        passed, self._passed = self._passed, None
        if passed is None:
            return
        drafted, packed, (tokens, counts) = passed
        rows = self.drafter.unpack_rows(packed).reshape(len(drafted), self._nodes, -1)
        emitted = tokens.cpu().numpy().reshape(len(drafted), self._nodes)
        known = [row for row, (name, _) in enumerate(drafted) if name in self.drafter]
        lengths = counts.tolist()
        self.drafter.learn_batch(
            [drafted[row][0] for row in known],
            [emitted[row, : lengths[row]] for row in known],
            [rows[row, : 1 + drafted[row][1]] for row in known],
        )

    def batch_get(
        self, req_ids: Sequence[str], batch_tokens: Sequence[Sequence[int]], total_lens: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Draft a tree for each request.

        Args:
            req_ids: `[B]` names of requests.
            batch_tokens: `[B]`, the last tokens of each text.
            total_lens: `[B]`, the tokens of each text.

        Returns:
            ids `[B * N]`, those of a tree after its root, which is the last token of the text; and flat `[B, N, N]`, 1
            where a node sees another one, its ancestors and itself. Trees are padded with tokens 0 after the root, as
            SGLang's own are.
        """
        for name, tail, total in zip(req_ids, batch_tokens, total_lens, strict=True):
            self._follow(name, list(tail), total)
        drafts = self.drafter.propose(req_ids, self._nodes - 1)
        self._drafted = [(name, len(draft)) for name, draft in zip(req_ids, drafts, strict=True)]
        ids, parents = np.zeros((2, len(drafts), self._nodes), np.int64)
        for row, (draft, tail) in enumerate(zip(drafts, batch_tokens, strict=True)):
            ids[row, 0] = tail[-1]
            ids[row, 1 : 1 + len(draft)] = draft.ids
            parents[row, 1 : 1 + len(draft)] = np.add(draft.parents, 1)
        masks, rows = np.tile(np.eye(self._nodes, dtype=np.int64), (len(drafts), 1, 1)), np.arange(len(drafts))
        for node in range(1, self._nodes):
            masks[:, node] |= masks[rows, parents[:, node]]
        return ids.reshape(-1), masks.reshape(-1)

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Ignore the ends of texts: `synchronize` learns from all tokens, with their rows of logits."""

    def erase_match_state(self, req_ids: Iterable[str]) -> None:
        """End requests that have left the batch."""
        for name in req_ids:
            if name in self.drafter:
                self.drafter.end(name)

    def reset(self) -> None:
        """Forget all requests, and what they taught."""
        self.drafter, self._passed, self._packed = self._fresh(None), None, None

    def _follow(self, name: str, tail: list[int], total: int) -> None:
        """Begin a request that is new, or whose text does not end as the drafter knows it."""
        if name in self.drafter:
            compared = min(_COMPARED, len(tail))
            if list(self.drafter.text(name)[-compared:]) == tail[-compared:]:
                return
            self.drafter.end(name)
        text = list(tail)
        if (request := self._texts.get(name)) is not None:
            held = [*request.origin_input_ids_unpadded, *request.output_ids]
            if 0 <= total - len(held) <= len(tail):  # with overlap, the last tokens are in the tail alone
                text = held + tail[len(tail) - (total - len(held)) :]
        self.drafter.begin(name, text)


def register(name: str = "LADE", *, memory: str | None = None) -> None:
    """Register the algorithm with SGLang, in this process.

    Args:
        name: what `--speculative-algorithm` is given.
        memory: a file made by `lade.Memory.save`, with which each worker begins. SGLang ends its workers without
            notice, so nothing is saved.
    """
    from sglang.srt.speculative.spec_info import CustomSpecAlgo, SpeculativeAlgorithm

    class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
        """What NGRAM is to the rest of SGLang."""

        create_future_map = SpeculativeAlgorithm.create_future_map

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def need_topk(self) -> bool:
            return False

        def carries_draft_hidden_states(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            _fill(server_args)

    SpeculativeAlgorithm.register(name, supports_overlap=True, validate_server_args=_validate, spec_class=Algorithm)(
        lambda _server_args: worker_class(memory)
    )


def worker_class(memory: str | None = None) -> type[Any]:
    """Return the worker's class, a subclass of SGLang's `NGRAMWorker`."""
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    class LadeWorker(NGRAMWorker):  # type: ignore[misc]
        """Verifies our trees."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            model = self.target_worker.model_runner.model_config
            self.ngram_corpus = Corpus(
                model.vocab_size,
                model.hf_eos_token_id or (),
                self.draft_token_num,
                trees=self.topk > 1,
                memory=memory,
            )
            _hook(self.target_worker, self.ngram_corpus.note_logits)

        def _prepare_draft_tokens(self, batch: Any) -> Any:
            self.ngram_corpus.expect(batch.reqs)
            return super()._prepare_draft_tokens(batch)

        def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().forward_batch_generation(batch, *args, **kwargs)
            self.ngram_corpus.note_accepted(result.next_draft_input.accept_tokens, result.next_draft_input.accept_lens)
            return result

    return LadeWorker


def _hook(target: Any, note_logits: Callable[[Any], None]) -> None:
    """Have the logits noted of passes that verify trees, before sampling adds penalties and masks to them in place."""
    original = target.forward_batch_generation

    def forward_batch_generation(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if kwargs.get("is_verify"):
            note_logits(result.logits_output.next_token_logits)
        return result

    target.forward_batch_generation = forward_batch_generation


def _validate(server_args: Any) -> None:
    """Raise unless SGLang is of a version that this was written for, and its settings are ones that it can serve."""
    if sglang.__version__ not in VERSIONS:
        raise UnsupportedError(
            f"SGLang {sglang.__version__} is not one of the versions that lade_sglang was written for "
            f"({', '.join(VERSIONS)})",
            f"install one of them: pip install 'sglang=={VERSIONS[-1]}'",
        )
    if server_args.tp_size > 1 or server_args.pp_size > 1:
        raise UnsupportedError(
            f"drafts of tp_size={server_args.tp_size}, pp_size={server_args.pp_size} ranks have to agree, which was "
            "not tried",
            "give --tp-size 1 --pp-size 1, and --dp-size for replicas",
        )
    if server_args.speculative_ngram_external_corpus_path is not None:
        raise UnsupportedError(
            f"speculative_ngram_external_corpus_path={server_args.speculative_ngram_external_corpus_path!r} is NGRAM's",
            "leave it out, or give --speculative-algorithm NGRAM",
        )


def _fill(server_args: Any) -> None:
    """Set what SGLang sets for NGRAM."""
    breadth = server_args.speculative_ngram_max_bfs_breadth
    if server_args.device == "cpu":
        server_args.disable_overlap_schedule = True
    if server_args.max_running_requests is None:
        server_args.max_running_requests = _MOST_REQUESTS
    server_args.enable_mixed_chunk = False
    server_args.speculative_eagle_topk = breadth
    if server_args.speculative_num_draft_tokens is None:
        server_args.speculative_num_draft_tokens = _TREE_TOKENS
    if server_args.speculative_num_steps is None:
        server_args.speculative_num_steps = server_args.speculative_num_draft_tokens // breadth
    if breadth > 1 and (server_args.page_size or 1) > 1 and server_args.attention_backend != "flashinfer":
        raise UnsupportedError(
            f"page_size={server_args.page_size} is not exact with trees in {server_args.attention_backend}",
            "give --page-size 1, --attention-backend flashinfer, or --speculative-ngram-max-bfs-breadth 1 for chains",
        )

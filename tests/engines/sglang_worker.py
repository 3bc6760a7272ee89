"""Modules that stand in for SGLang's: its NGRAM worker on the CPU, with a model's logits in place of passes.

Names, arguments, shapes and the order of calls are those of SGLang 0.5.23 (`ngram_worker`, `eagle_sample`,
`spec_info`, `spec_registry`). Requests have texts in which the last pass's tokens come late, as with its overlap
scheduling.
"""

from __future__ import annotations

import enum
import importlib.machinery
import types
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

LATE = 18  # max_trie_depth: tokens of a text that a corpus is given


class CustomSpecAlgo:
    def __init__(self, name, factory, *, supports_overlap=False, validate_server_args=None):
        self.name, self.factory = name, factory
        self.supports_overlap, self.validate_server_args = supports_overlap, validate_server_args

    def is_ngram(self):
        return False

    def has_draft_kv(self):
        return True

    def handle_server_args(self, server_args):
        pass

    def create_worker(self, server_args):
        return self.factory(server_args)


class SpeculativeAlgorithm(enum.Enum):
    NGRAM = enum.auto()

    @classmethod
    def register(cls, name, *, spec_class=CustomSpecAlgo, **settings):
        def decorator(factory):
            REGISTRY[name.upper()] = spec_class(name, factory, **settings)
            return factory

        return decorator

    def create_future_map(self, device, req_to_token_pool, needs_cpu_seq_lens=True, needs_confidence_relay=False):
        return self


REGISTRY: dict[str, CustomSpecAlgo] = {}


@dataclass
class Req:
    """A request: what the scheduler has processed of it."""

    rid: str
    origin_input_ids_unpadded: list[int]
    output_ids: list[int] = field(default_factory=list)

    @property
    def text(self):
        return [*self.origin_input_ids_unpadded, *self.output_ids]


@dataclass
class Batch:
    reqs: list[Req]
    is_verify: bool
    pending: list[list[int]] = field(default_factory=list)  # tokens of the last pass that are not in output_ids yet


class NgramCorpus:
    """SGLang's own, of which nothing is to be used."""


class NGRAMWorker:
    def __init__(self, server_args, gpu_id, nccl_port, target_worker):
        self.server_args, self._target_worker = server_args, target_worker
        self.draft_token_num = server_args.speculative_num_draft_tokens
        self.topk = server_args.speculative_eagle_topk
        self.ngram_corpus = NgramCorpus()
        self._prev_decode_rids = set()

    @property
    def target_worker(self):
        return self._target_worker

    def clear_cache_pool(self):
        self.ngram_corpus.reset()
        self._prev_decode_rids = set()

    def _prepare_draft_tokens(self, batch):
        pairs = zip(batch.reqs, batch.pending, strict=True)
        texts = [[*req.text, *late] for req, late in pairs]
        self.ngram_corpus.synchronize()
        names = [req.rid for req in batch.reqs]
        ids, mask = self.ngram_corpus.batch_get(names, [text[-LATE:] for text in texts], list(map(len, texts)))
        assert len(ids) == len(batch.reqs) * self.draft_token_num
        return ids, mask

    def forward_batch_generation(self, batch, on_publish=None, pp_proxy_tensors=None):
        width, size = self.draft_token_num, len(batch.reqs)
        if not batch.is_verify:
            result = self.target_worker.forward_batch_generation(batch, pp_proxy_tensors=pp_proxy_tensors)
            tokens = torch.zeros(size, width, dtype=torch.int32)
            tokens[:, 0] = result.next_token_ids
            return self._result(tokens, torch.ones(size, dtype=torch.int32))
        ids, mask = self._prepare_draft_tokens(batch)
        batch.ids, batch.mask = ids.reshape(size, width), mask.reshape(size, width, width)
        result = self.target_worker.forward_batch_generation(batch, pp_proxy_tensors=pp_proxy_tensors, is_verify=True)
        logits = result.logits_output.next_token_logits
        chosen = logits.argmax(-1).reshape(size, width)
        logits.add_(1.0).clamp_(max=-1.0)  # as penalties and grammars alter them in place
        tokens, counts = torch.full((size, width), -7, dtype=torch.int32), torch.zeros(size, dtype=torch.int32)
        for row in range(size):
            path = accepted(batch.ids[row], links(batch.mask[row]), chosen[row].tolist())
            tokens[row, : len(path)], counts[row] = chosen[row, path].int(), len(path)
        self.ngram_corpus.batch_put([req.output_ids[-LATE:] for req in batch.reqs])
        names = {req.rid for req in batch.reqs}
        if departed := self._prev_decode_rids - names:
            self.ngram_corpus.erase_match_state(list(departed))
        self._prev_decode_rids = names
        return self._result(tokens, counts)

    def _result(self, tokens, counts):
        following = SimpleNamespace(accept_tokens=tokens.flatten(), accept_lens=counts)
        return SimpleNamespace(next_draft_input=following, accept_lens=counts)


def links(mask):
    """The parent of each node as `_derive_tree_links` finds it: the last ancestor before it, -1 for a root."""
    order = np.arange(len(mask))
    ancestors = mask & (order < order[:, None])
    return np.where(ancestors.any(-1), (ancestors * order).argmax(-1), -1)


def accepted(ids, parents, chosen):
    """The nodes from the root on along which each is the token that was chosen after its parent."""
    path = [0]
    while True:
        children = [node for node in range(1, len(ids)) if parents[node] == path[-1] and ids[node] == chosen[path[-1]]]
        if not children:
            return path
        path.append(children[0])


class TargetWorker:
    """A `TpModelWorker` whose logits at a node are those of a model after the text and the node's ancestors."""

    def __init__(self, logits, vocabulary, eos=None):
        config = SimpleNamespace(vocab_size=vocabulary, hf_eos_token_id=eos)
        self.model_runner, self._logits = SimpleNamespace(model_config=config), logits

    def forward_batch_generation(self, batch, pp_proxy_tensors=None, is_verify=False):
        texts = [req.text for req in batch.reqs]
        if not is_verify:
            chosen = torch.stack([self._logits(text) for text in texts]).argmax(-1)
            return SimpleNamespace(next_token_ids=chosen)
        rows = []
        for text, late, ids, mask in zip(texts, batch.pending, batch.ids, batch.mask, strict=True):
            before = [*text, *late][:-1]
            assert ids[0] == [*text, *late][-1]
            rows += [self._logits(before + ids[seen.astype(bool)].tolist()) for seen in mask]
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=torch.stack(rows)))


def modules(version):
    """Return the modules by name, for `sys.modules`."""
    contents = {
        "sglang": {"__version__": version},
        "sglang.srt": {},
        "sglang.srt.speculative": {},
        "sglang.srt.speculative.ngram_worker": {"NGRAMWorker": NGRAMWorker},
        "sglang.srt.speculative.spec_info": {
            "CustomSpecAlgo": CustomSpecAlgo,
            "SpeculativeAlgorithm": SpeculativeAlgorithm,
        },
    }
    made = {}
    for name, members in contents.items():
        made[name] = types.ModuleType(name)
        made[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        made[name].__dict__.update(members)
    return made


def arguments(**settings):
    """Return `ServerArgs` as a plug-in sees them."""
    given = {"tp_size": 1, "pp_size": 1, "device": "cuda", "page_size": 1, "attention_backend": "flashinfer"}
    given |= {"disable_overlap_schedule": False, "max_running_requests": None, "enable_mixed_chunk": True}
    unset = ("eagle_topk", "num_steps", "num_draft_tokens", "ngram_external_corpus_path")
    given |= {f"speculative_{name}": None for name in unset} | {"speculative_ngram_max_bfs_breadth": 10}
    return SimpleNamespace(**given | settings)


def serve(worker, prompts, count, *, most=8, is_late=True):
    """Greedy decoding as SGLang's scheduler has it, of at most so many requests at once.

    Returns:
        the tokens of each request, and the passes that verified trees.
    """
    waiting, running, done, passes = [Req(*each) for each in prompts.items()], [], {}, 0
    late: dict[str, list[int]] = {}
    while waiting or running:
        while waiting and len(running) < most:
            req = waiting.pop(0)
            result = worker.forward_batch_generation(Batch([req], is_verify=False))
            late[req.rid] = result.next_draft_input.accept_tokens[:1].tolist()
            running.append(req)
        if not is_late:
            for req in running:
                req.output_ids += late.pop(req.rid)
                late[req.rid] = []
        result = worker.forward_batch_generation(Batch(running, True, [late[req.rid] for req in running]))
        passes += 1
        tokens = result.next_draft_input.accept_tokens.reshape(len(running), -1).tolist()
        for req, row, length in zip(running, tokens, result.accept_lens.tolist(), strict=True):
            req.output_ids += late[req.rid]
            late[req.rid] = row[:length]
        for req in [each for each in running if len(each.output_ids) + len(late[each.rid]) >= count]:
            done[req.rid] = [*req.output_ids, *late.pop(req.rid)][:count]
            running.remove(req)
    return done, passes

"""One training run: model, optimizers and how far it has read, steppable and resumable."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from lade.errors import InputError
from training.batch_order import RowOrder
from training.loops import LoopRows, loop_loss, make_loops
from training.plan import Shape, TrainPlan
from training.tokens import EncodedCorpus

Loss = Callable[[torch.Tensor], torch.Tensor]
LossAndPenalty = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Progress:
    """Progress of a run; `short_rows` and `long_rows` are the numbers of the next rows to read."""

    tokens: int = 0
    short_rows: int = 0
    long_rows: int = 0
    seconds: float = 0.0


class Trainer:
    """Trains a Llama of `shape` on `corpus` after `plan`; `step` reads one batch."""

    def __init__(self, corpus: EncodedCorpus, plan: TrainPlan, shape: Shape, *, fast: bool = False) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.shape, self.progress = plan, shape, Progress()
        self.model = LlamaForCausalLM(shape.config())
        self._optimizers = _optimizers(self.model, plan)
        self._short = RowOrder(corpus, plan.short_tokens, plan.seed)
        self._long = RowOrder(corpus, plan.long_tokens, plan.seed)
        self._fast = fast
        self._loss: Loss = torch.compile(self._mean_loss, dynamic=False) if fast else self._mean_loss
        both = self._mean_loss_and_penalty
        self._loss_and_penalty: LossAndPenalty = torch.compile(both, dynamic=False) if fast else both

    @property
    def done(self) -> bool:
        """True if the plan's tokens have been read."""
        return self.progress.tokens >= self.plan.total_tokens

    def step(self) -> torch.Tensor:
        """Read one batch, move the weights, and return the batch's mean loss in nats per token, []."""
        rate = self.plan.rate(self.progress.tokens)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._fast):
            if self.plan.breaks_loops(self.progress.tokens):
                rows, loops = self._next_batch_and_loops()
                loss, penalty = self._loss_and_penalty(rows, loops.ids, loops.earlier, loops.looping)
            else:
                loss, penalty = self._loss(self._next_batch()), torch.zeros(())
        (loss + self.plan.loop_weight * penalty).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip_norm)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_lr"] * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def save(self, path: Path) -> None:
        """Write everything a later run needs to `path`, atomically: a kill leaves the old file or the new one."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self._optimizers],
            "progress": asdict(self.progress),
            "plan": asdict(self.plan),
            "shape": asdict(self.shape),
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def resume(self, path: Path) -> None:
        """Go on from what `save` wrote.

        Raises InputError if the file is no checkpoint, or was made with another shape or an incompatible plan.
        """
        state = _read_checkpoint(path)
        _check_plan(self.plan, TrainPlan(**state["plan"]), state["progress"]["tokens"])
        if state["shape"] != asdict(self.shape):
            raise InputError(f"shape {self.shape}: the checkpoint {path} has {state['shape']}; use a fresh work folder")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])

    def _next_batch(self) -> torch.Tensor:
        """Return the next rows and count them as read, [rows, T + 1]."""
        length = self.plan.row_tokens(self.progress.tokens)
        count = self.plan.batch_tokens // length
        is_long = length == self.plan.long_tokens
        if is_long:
            rows = self._long.batch(self.progress.long_rows, count)
            self.progress.long_rows += count
        else:
            rows = self._short.batch(self.progress.short_rows, count)
            self.progress.short_rows += count
        self.progress.tokens += self.plan.batch_tokens
        return rows

    def _next_batch_and_loops(self) -> tuple[torch.Tensor, LoopRows]:
        """Return the next rows, and loops made of one in eight of them."""
        seed = [self.plan.seed, self.progress.tokens]
        rows = self._next_batch()
        return rows, make_loops(rows[: max(1, len(rows) // 8)], seed)

    def _mean_loss(self, rows: torch.Tensor) -> torch.Tensor:  # rows: [B, T + 1] -> []
        return -self._log_probs(rows).mean()

    def _mean_loss_and_penalty(
        self, rows: torch.Tensor, loops: torch.Tensor, earlier: torch.Tensor, looping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:  # rows: [B, T + 1]  loops: [R, T + 1]  earlier, looping: [R, T] -> [], []
        log_probs = self._log_probs(torch.cat([rows, loops]))
        return -log_probs[: len(rows)].mean(), loop_loss(log_probs[len(rows) :], earlier, looping)

    def _log_probs(self, rows: torch.Tensor) -> torch.Tensor:  # rows: [B, T + 1] -> [B, T]
        hidden = self.model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden).float()
        nats = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        return -nats.view(len(rows), -1)


def _optimizers(model: LlamaForCausalLM, plan: TrainPlan) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for the rest, which Muon is not made for."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    embedding = [model.get_input_embeddings().weight]
    muon = torch.optim.Muon(
        [{"params": matrices, "full_lr": plan.matrix_lr}],
        lr=plan.matrix_lr,
        weight_decay=plan.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [{"params": vectors, "full_lr": plan.vector_lr}, {"params": embedding, "full_lr": plan.vector_lr}],
        lr=plan.vector_lr,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=True,
    )
    return [muon, adamw]


def _read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises pickle's, zip's and its own errors for a broken file
        remedy = "remove it to start again"
        raise InputError(f"checkpoint {path}: cannot be read ({type(error).__name__}); {remedy}") from error
    if not isinstance(state, dict) or not {"model", "optimizers", "progress", "plan", "shape"} <= state.keys():
        raise InputError(f"checkpoint {path}: not one of this trainer; remove it to start again")
    return state


def _check_plan(plan: TrainPlan, saved: TrainPlan, tokens: int) -> None:
    """Refuse a plan that would have led elsewhere than where the checkpoint is."""
    for field, value in asdict(saved).items():
        mine = getattr(plan, field)
        if field != "total_tokens" and mine != value:
            raise InputError(f"{field}={mine}: the run was begun with {value}; keep it or use a fresh work folder")
    if plan.total_tokens == saved.total_tokens:
        return
    if saved.in_tail(tokens):
        remedy = f"the tail of {saved.total_tokens} has begun; keep that total"
        raise InputError(f"total_tokens={plan.total_tokens}: {remedy}")
    least = math.ceil(tokens / (1 - plan.tail_share)) if plan.tail_share < 1 else saved.total_tokens
    if plan.total_tokens < least:
        remedy = f"{tokens} tokens are read and the tail is still to come; use {least} or more"
        raise InputError(f"total_tokens={plan.total_tokens}: {remedy}")

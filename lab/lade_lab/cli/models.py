"""Models of a benchmark: as loaded, inflated, packed, and a draft model."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from lade.backends.cpu.invariant import make_invariant
from lade.backends.cpu.packing import pack as packing
from lade.cli import loading
from lade.cli.terminal import Terminal
from lade.errors import ConfigError, InputError
from lade.machine import uninvariant_reason
from lade.memory import fingerprint_of
from lade.tuning.packing_choice import pack_if_it_pays
from lade_lab.cli.job import Plan
from lade_lab.harness.arms import Models
from lade_lab.harness.methods import TRANSFORMERS
from lade_lab.inflation import inflate
from lade_lab.results import Model


def load_models(plan: Plan, term: Terminal) -> tuple[Models, Any]:
    """The model, packed and unpacked, the draft, and the tokenizer."""
    threads = torch.get_num_threads()
    loaded = loading.load(replace(plan.loading, weights=None), term=term)
    model, own_parameters = loaded.model, loaded.model.num_parameters()
    if plan.weights.inflate is not None:
        model = _inflated(model, plan.weights.inflate)
        torch.set_num_threads(threads)  # one thread is for the embedded model at its own size
    if plan.loading.weights is not None:  # all methods run on this model, transformers' own ones too
        packing.pack(model, weights=plan.loading.weights)
    draft = None
    if plan.draft is not None:
        draft = loading.load(plan.loading.for_model(plan.draft), term=term)
        if fingerprint_of(draft.tokenizer) != fingerprint_of(loaded.tokenizer):
            raise InputError(
                f"draft {plan.draft!r} has a different tokenizer than {plan.loading.label()!r}: give one of its family"
            )
    if plan.weights.threads is not None:
        torch.set_num_threads(plan.weights.threads)
    wanted = plan.weights.invariant
    invariant = not uninvariant_reason(model) if wanted is None else wanted
    record = Model(
        name=plan.model_name(invariant=invariant),
        kind=model.config.model_type,
        parameters=model.num_parameters(),
        dtype=loaded.dtype,
        inflated_from=None if plan.weights.inflate is None else own_parameters,
        draft=None if plan.draft is None else plan.loading.for_model(plan.draft).label(),
    )
    packed = _packed(model, plan, term, panels=invariant)
    if invariant:
        term.show_status("checking batch invariance")
        model, packed = make_invariant.invariant(model if packed is None else packed), None
    return Models(record, model, packed, None if draft is None else draft.model), loaded.tokenizer


def _inflated(model: Any, params: float) -> Any:
    try:
        return inflate(model, params)
    except ConfigError as problem:
        raise ConfigError("inflate", params, problem.remedy) from problem


def _packed(model: Any, plan: Plan, term: Terminal, *, panels: bool) -> Any:
    """A packed copy where that is wanted, or can be done and pays; else None."""
    may_pay = model.device.type == "cpu" and (plan.loading.model is not None or plan.weights.inflate is not None)
    ours = any(method.kind not in TRANSFORMERS for method in plan.methods)
    if not (plan.weights.pack or (plan.weights.pack is None and may_pay and ours)):
        return None
    if not plan.weights.pack:
        copy = deepcopy(model)
        reason = pack_if_it_pays(copy)
        if reason and term.debug:
            term.say(f"not packed: {reason}", "dim")
        return None if reason else copy
    return packing.pack(deepcopy(model), panels=panels) if packing.packable(model) else None

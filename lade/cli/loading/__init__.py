"""Loading of a model and its tokenizer for the shell, in one process or several started by torchrun."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from lade import ConfigError, InputError, Memory, load_gguf, load_packed, machine
from lade.cli.loading import from_pretrained as checkpoint
from lade.cli.options.model import Loading
from lade.cli.terminal import Terminal, one_line
from lade.config import Lookahead, LookaheadConfig

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
BEAM_FIELDS = ("early_stopping", "length_penalty")
_DECIDED_BY_THE_SHELL = frozenset(
    """
    num_beams num_beam_groups num_return_sequences diversity_penalty penalty_alpha dola_layers max_length max_new_tokens
    max_time stop_strings prompt_lookup_num_tokens use_mtp use_cache cache_implementation cache_config
    return_dict_in_generate output_scores output_logits output_attentions output_hidden_states
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
)
"""Fields of a checkpoint's generation_config that the shell's options replace, beside those above."""


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its tokenizer."""

    name: str  # as the user gave it, or "embedded"
    model: Any  # its generation_config is greedy
    tokenizer: Any
    checkpoint_defaults: Mapping[str, Any]  # of sampling and beams, which `model` lacks
    variant: Mapping[str, str]  # options that change its output, see `Loading.variant`
    processor: Callable[[], Any]  # loads the image processor, once; `InputError` without one
    undone: Mapping[str, str]  # why it is not "packed" or "invariant", where it is not
    context: int | None  # length in tokens; None if the config does not say
    context_is_hard: bool  # the model cannot run beyond it

    @property
    def dtype(self) -> str:
        """Name of the dtype, such as "float32"."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def facts(self) -> dict[str, Any]:
        """Fields about the model that every `--json` prints."""
        return {"model": self.name, "dtype": self.dtype, **machine.setup_of(self.model)}

    @property
    def layout(self) -> str:
        """Weight layout to show after the dtype, such as ", int8, invariant"."""
        found = machine.setup_of(self.model)
        layout = found["weights"] or ("packed" if found["packed"] else "")
        return (f", {layout}" if layout else "") + (", invariant" if found["invariant"] else "")

    def room(self, ids: list[int], max_new_tokens: int, *, within: bool = False) -> int:
        """Return how many of `max_new_tokens` can be generated; `within`: without exceeding the context."""
        if self.context is None or not (within or self.context_is_hard):
            return max_new_tokens
        return min(max_new_tokens, self.context - len(ids) + (not within))  # the last token is never fed

    def check(self, ids: list[int], *, media: bool = False) -> None:
        """Raise `InputError` for ids that the model cannot continue; those that stand for `media` may be any."""
        if not ids:
            raise InputError("the prompt has no tokens: give a longer one")
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if not media and max(ids) >= vocabulary:
            raise InputError(
                f"the tokenizer yields the id {max(ids)}, but the model has a vocabulary of {vocabulary}: "
                f"{self.name!r} needs the tokenizer it was trained with"
            )
        if self.context and len(ids) >= self.context:
            raise InputError(
                f"the prompt has {len(ids)} tokens, but the model's context holds {self.context}: shorten the prompt"
            )


def load(
    loading: Loading,
    *,
    term: Terminal,
    pack: bool | None = False,
    images: bool | None = False,
    invariant: bool | None = False,
    threads: int | None = None,
    processes: int = 1,
) -> LoadedModel:
    """Load a model for the shell; the embedded one runs on one CPU thread.

    Args:
        loading: options of the model.
        term: terminal that shows the progress.
        pack: prepack linear layers for the CPU; None if that pays, and never for the embedded model.
        images: load a model that takes images; None if it can.
        invariant: make the model batch invariant; None on a CPU in 16 bits, int8 or int4, if possible.
        threads: CPU threads; None for torch's default, and 1 for the embedded model.
        processes: number of processes to split the layers over; each of them calls this.
    """
    loading.check()
    if processes > 1:
        loading.check_split(pack=pack, invariant=invariant)
    if processes > 1 or loading.attn_implementation is not None:
        invariant = bool(invariant)
    term.closing.enter_context(nullcontext() if term.debug else checkpoint.quiet())
    target = _target(loading, processes)
    term.show_status(f"looking for {loading.name}")
    source = checkpoint.find(loading)
    with checkpoint.downloading(term) if source.download and term.animated else nullcontext():
        term.show_status(f"loading {source.shown}")
        if source.stored == "gguf":
            model, tokenizer = _load_gguf(source, loading, processes)
        else:
            tokenizer, given = checkpoint.load_tokenizer(source, loading), (source, loading)
            model = _load_packed(*given) if source.stored else checkpoint.load_model(*given, target, images, processes)
        processor = functools.cache(functools.partial(checkpoint.load_processor, source, loading))
        if loading.adapter is not None:
            checkpoint.put_adapter(model, loading, source)
    if threads is not None or loading.model is None:  # so small a model gains nothing from more threads
        torch.set_num_threads(threads or 1)
    if source.stored:
        loading = replace(loading, weights=None)
    undone = _set_up(model, loading, term, pack=False if source.stored and pack is None else pack, invariant=invariant)
    variant = {**loading.variant, **({"weights": str(machine.setup_of(model)["weights"])} if source.stored else {})}
    defaults = _make_greedy(model, source.shown)
    return LoadedModel(source.shown, model, tokenizer, defaults, variant, processor, undone, *machine.context_of(model))


def _set_up(
    model: Any, loading: Loading, term: Terminal, *, pack: bool | None, invariant: bool | None
) -> dict[str, str]:
    """Pack a model and make it invariant as the options say; return `LoadedModel.undone`."""
    small = pack is None and loading.model is None  # the embedded model gains nothing from it
    pack, aside = False if small else pack, functools.partial(term.say, style="dim")
    undone = machine.set_up(model, pack=pack, weights=loading.weights, invariant=invariant, say=aside)
    return {**undone, "packed": "the embedded model is too small"} if small and "packed" in undone else undone


def _make_greedy(model: Any, shown: str) -> dict[str, Any]:
    """Leave stop tokens and penalties in a model's generation_config; return its settings of sampling and beams."""
    settings = {name: value for name, value in model.generation_config.to_dict().items() if value is not None}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = settings.get(name, [])
        if not all(isinstance(each, int) for each in (ids if isinstance(ids, list) else [ids])):
            raise InputError(f"{shown}: generation_config.json has {name}={ids!r}: give ids of tokens there")
    if settings.get("temperature") == 0:  # as some checkpoints ask for greedy decoding
        settings |= {"temperature": 1.0, "do_sample": False}
    defaults = {name: settings[name] for name in ("do_sample", *SAMPLING_FIELDS, *BEAM_FIELDS) if name in settings}
    kept = {name: value for name, value in settings.items() if name not in {*defaults, *_DECIDED_BY_THE_SHELL}}
    model.generation_config = GenerationConfig.from_dict({**kept, "do_sample": False, "num_beams": 1})
    return defaults


def with_memory(loaded: LoadedModel, lookahead: Lookahead, memory: Path | None) -> Lookahead:
    """Return `lookahead` with the draft memory of a file, or an empty one that will be saved there, if one is named."""
    if memory is None:
        return lookahead
    assert isinstance(lookahead, LookaheadConfig), "Speed.lookahead ensures it"
    return replace(lookahead, memory=Memory.load(memory, loaded.tokenizer) if memory.exists() else Memory())


def _load_packed(source: checkpoint.ModelSource, loading: Loading) -> Any:
    """Load a model that `lade pack` saved, which fixes dtype, device and quantization."""
    if loading.dtype != "auto":
        raise ConfigError("dtype", loading.dtype, "not available for a packed model")
    _check_packed(loading)
    model = load_packed(source.name, attn_implementation=loading.attn_implementation)
    weights = machine.setup_of(model)["weights"]
    if loading.weights not in (None, weights):
        raise ConfigError("weights", loading.weights, f"the model is packed in {weights}")
    return model


def _load_gguf(source: checkpoint.ModelSource, loading: Loading, processes: int) -> tuple[Any, Any]:
    """Load model and tokenizer from a GGUF file, which fixes device and quantization."""
    if processes > 1:
        raise InputError(f"model file {source.shown!r} cannot be split over processes: run it without torchrun")
    if loading.weights is not None:
        raise ConfigError("weights", loading.weights, "the weights are those of a GGUF file")
    if loading.adapter is not None:
        raise ConfigError("adapter", loading.adapter, "not available for a GGUF file")
    _check_packed(loading)
    dtype: torch.dtype = torch.bfloat16 if loading.dtype == "auto" else getattr(torch, loading.torch_dtype)
    return load_gguf(source.name, dtype=dtype)


def _check_packed(loading: Loading) -> None:
    """Raise `ConfigError` for options that contradict packed weights."""
    for name, value in {"quantization": loading.quantization, "device-map": loading.device_map}.items():
        if value:
            raise ConfigError(name, value, "not available for a packed model")
    if loading.device not in ("auto", "cpu"):
        raise ConfigError("device", loading.device, "the model is packed for the CPU")


def _target(loading: Loading, processes: int) -> torch.device | None:
    """Return the device to load to; None where layers go to several."""
    if loading.device_map is not None or processes > 1:
        return None
    name = loading.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        name = name if loading.weights is None else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except Exception as problem:
        reason = one_line(str(problem).split("\n", 1)[0], 120)
        raise ConfigError("device", name, f"not available ({reason}): give cpu") from problem
    return device


def join_processes(term: Terminal) -> int:
    """Join the processes of torchrun and return their number; 1 without torchrun.

    All but the first write nothing but errors from then on.
    """
    processes = machine.join_processes()
    if processes > 1 and not machine.is_first_process():
        term.mute()
    return processes

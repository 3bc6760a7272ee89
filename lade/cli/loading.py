"""Loading a model and its tokenizer, from a folder, the hub, or the embedded one. All that can go wrong is one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as _logging

from lade.cli import checkpoint
from lade.cli.terminal import Terminal, one_line
from lade.config import LookaheadConfig
from lade.decoding.memory import Memory
from lade.errors import ConfigError, InputError, UnsupportedModelError
from lade.model import packing
from lade.model.positions import LEARNED_POSITIONS

EMBEDDED = "embedded"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_HUB_TIMEOUT_S = 5.0
_SILENT = 50  # logging.CRITICAL
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
BEAM_FIELDS = ("early_stopping", "length_penalty")
_DECIDED_BY_THE_SHELL = frozenset(
    [
        *SAMPLING_FIELDS,
        *BEAM_FIELDS,
        "do_sample",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "diversity_penalty",
        "penalty_alpha",
        "dola_layers",
        "max_length",
        "max_new_tokens",
        "max_time",
        "stop_strings",
        "prompt_lookup_num_tokens",
        "use_mtp",
        "use_cache",
        "cache_implementation",
        "cache_config",
        "return_dict_in_generate",
        "output_scores",
        "output_logits",
        "output_attentions",
        "output_hidden_states",
    ]
)
"""Fields of a checkpoint's generation_config that would make it anything else than greedy decoding of one text."""


@dataclass(frozen=True)
class Subject:
    """A loaded model with its tokenizer.

    Attributes:
        name: as the user gave it, or "embedded".
        model: a transformers causal language model; its generation_config decodes greedily.
        tokenizer: its tokenizer.
        wishes: what its checkpoint's generation_config says of sampling and beams, and `model` no longer knows.
    """

    name: str
    model: Any
    tokenizer: Any
    wishes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Such as "float32"."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def packed(self) -> bool:
        """Whether any of its layers are prepacked for the CPU."""
        return packing.packed_layers(self.model) > 0

    @property
    def context(self) -> int | None:
        """Tokens the model was made for; None where it does not say."""
        config = self.model.config.get_text_config(decoder=True)
        length = getattr(config, "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None

    @property
    def ends(self) -> bool:
        """Whether the model cannot run beyond its context at all, because it looks positions up in a table."""
        return self.model.config.get_text_config(decoder=True).model_type in LEARNED_POSITIONS

    def room(self, ids: list[int], max_new_tokens: int, *, within: bool = False) -> int:
        """How many of `max_new_tokens` can be generated; `within`: without leaving the context."""
        if self.context is None or not (within or self.ends):
            return max_new_tokens
        return min(max_new_tokens, self.context - len(ids) + (not within))  # the last token is not fed any more

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, special tokens included; see `check`."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        self.check(ids)
        return ids

    def check(self, ids: list[int]) -> None:
        """Raise `InputError` for ids that the model cannot continue."""
        if not ids:
            raise InputError("the prompt has no tokens: give a longer one")
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if max(ids) >= vocabulary:
            raise InputError(
                f"the tokenizer yields the id {max(ids)}, but the model has a vocabulary of {vocabulary}: "
                f"{self.name!r} needs the tokenizer it was trained with"
            )
        if self.context and len(ids) >= self.context:
            raise InputError(
                f"the prompt has {len(ids)} tokens, but the model's context holds {self.context}: shorten the prompt"
            )


def load(name: str | None, *, dtype: str, device: str, term: Terminal, pack: bool | None = False) -> Subject:
    """Load a model for the shell; the embedded one runs on one CPU thread.

    Args:
        name: folder or hub id; None for the embedded model.
        dtype: one of `DTYPES`.
        device: "auto", or any name torch knows.
        term: says whether transformers may talk.
        pack: prepack the linear layers for the CPU; None: if that can be done, the embedded model excepted.

    Raises:
        ConfigError, InputError, UnsupportedModelError: the one line that the user is to read.
    """
    if not term.debug:
        term.closing.enter_context(_quiet())
    torch_dtype = _dtype(dtype, embedded=name is None)
    target = _device(device)
    source, only_local = _source(name)
    shown = EMBEDDED if name is None else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=only_local, trust_remote_code=False)
    except Exception as problem:
        raise InputError(_explain(shown, source, "its tokenizer cannot be loaded", problem)) from problem
    if not len(tokenizer):
        raise InputError(f"model {shown!r}: its tokenizer has no vocabulary; put the model's tokenizer.json beside it")
    model = _load_model(shown, source, only_local, torch_dtype)
    checkpoint.check(model, shown, source)
    try:
        model = model.to(target)
    except Exception as problem:
        raise InputError(f"model {shown!r} does not fit on device {device!r}: {one_line(problem)}") from problem
    if pack or (pack is None and name is not None and target.type == "cpu"):
        _pack(model, term, wanted=bool(pack))
    if name is None:
        torch.set_num_threads(1)  # so small a model gains nothing from two, which on a busy machine wait for each other
    wishes = {name: getattr(model.generation_config, name, None) for name in (*SAMPLING_FIELDS, *BEAM_FIELDS)}
    model.generation_config = _greedy(model.generation_config)
    return Subject(shown, model, tokenizer, {name: wish for name, wish in wishes.items() if wish is not None})


def remembering(
    subject: Subject, lookahead: LookaheadConfig | str | None, memory: Path | None
) -> LookaheadConfig | str | None:
    """`lookahead` with a memory from a file, if one was asked for.

    Raises:
        InputError: it cannot be read, is damaged, or is of another tokenizer.
    """
    if memory is None:
        return lookahead
    assert isinstance(lookahead, LookaheadConfig), "options.lookahead_of sees to it"
    return replace(lookahead, memory=Memory.load(memory, subject.tokenizer))


def _pack(model: Any, term: Terminal, *, wanted: bool) -> None:
    """Nobody has asked for packing where it is not `wanted`, so nobody is told why there is none."""
    try:
        packing.pack(model)
    except UnsupportedModelError as problem:
        if wanted:
            raise
        if term.debug:
            term.say(f"not packed: {problem}", "dim")


def _load_model(shown: str, source: str, only_local: bool, dtype: torch.dtype | str) -> Any:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, local_files_only=only_local, trust_remote_code=False, output_loading_info=True
        )
    except Exception as problem:
        raise InputError(_explain(shown, source, "it cannot be loaded", problem)) from problem
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise InputError(
            f"model {shown!r} lacks {len(missing)} of the weights of a {type(model).__name__} (first {missing[0]}): "
            "give a complete checkpoint of a causal language model"
        )
    return model


def _source(name: str | None) -> tuple[str, bool]:
    """What to hand to `from_pretrained`, and whether to keep off the network."""
    if name is None:
        from lade.demo.embedded import model_path

        return str(model_path()), True
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise InputError(f"model folder {name!r} has no config.json: give a folder that save_pretrained wrote")
        return str(folder), True
    if folder.exists():
        raise InputError(f"model {name!r} is a file: give the folder it lies in")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise InputError(f"model folder {name!r} does not exist: check the path, or give a hub id such as org/name")
    return name, _only_cached(name)


def _only_cached(name: str) -> bool:
    """Ask the hub once, without the retries of a download; where it cannot be reached, a cached copy will do."""
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except (RepositoryNotFoundError, HFValidationError) as problem:
        raise InputError(f"model {name!r} is neither a folder here nor a model on the hub: check the name") from problem
    except GatedRepoError as problem:
        raise InputError(
            f"model {name!r} is gated on the hub: accept its terms there, then log in with hf auth login"
        ) from problem
    except Exception as problem:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return True
        raise InputError(
            f"model {name!r} is no folder here, and the hub cannot be reached ({one_line(problem, 120)}): "
            "check the network, or give a folder"
        ) from problem
    return False


def _dtype(name: str, *, embedded: bool) -> torch.dtype | str:
    if name not in DTYPES:
        raise ConfigError("dtype", name, f"give one of {', '.join(DTYPES)}")
    if name == "auto":
        # The embedded weights are stored in bfloat16 to be small; where near ties do not round apart, texts are equal.
        return torch.float32 if embedded else "auto"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except Exception as problem:
        reason = one_line(str(problem).split("\n", 1)[0], 120)
        raise ConfigError("device", name, f"it is not there ({reason}); give cpu, or leave it out") from problem
    return device


def _explain(name: str, source: str, what: str, problem: Exception) -> str:
    """One line for what transformers or safetensors raised."""
    reason = str(problem)
    if "Unrecognized configuration class" in reason:
        found = re.search(r"(\w+)Config'?>", reason)
        kind = f"a {found[1]} model" if found else "something else"
        return f"model {name!r} is {kind}, not a causal language model: give a decoder-only checkpoint"
    if known := checkpoint.why_not_loaded(source, problem):
        return f"model {name!r}: {known}"
    first = one_line(reason.split("\n", 1)[0] or type(problem).__name__, 240).rstrip(".:")
    return f"model {name!r}: {what} ({first}); check that its files are complete"


def _greedy(config: GenerationConfig) -> GenerationConfig:
    """A checkpoint's generation_config, its stop tokens and penalties kept, made greedy without a word of warning."""
    kept = {key: value for key, value in config.to_dict().items() if key not in _DECIDED_BY_THE_SHELL}
    return GenerationConfig.from_dict({**kept, "do_sample": False, "num_beams": 1})


@contextmanager
def _quiet() -> Iterator[None]:
    """Transformers' progress bars and advice are switched off, and afterwards are as they were."""
    logging: Any = _logging  # untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(_SILENT)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()

"""Options of the model to load, and of its chat template."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lade import ConfigError
from lade.cli.options import Checked, options_in
from lade.cli.prompts import check_text

EMBEDDED = "embedded"
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
DEVICES = ("auto", "cpu", "cuda", "mps")
QUANTIZATIONS = ("bnb-4bit", "bnb-8bit", "quanto-int4", "quanto-int8", "torchao-float8", "torchao-int8")
"""Names of `from_pretrained.SCHEMES`, which cannot be imported without torch."""
WEIGHTS = ("int8", "int4")
"""Integer formats of `lade.pack`."""
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64", *ALIASES)

_option, _expert = options_in("Model"), options_in("Model loading")

NamedModel = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Folder, hub id or .gguf file, in place of --model.", show_default=False),
]
"""Positional argument of commands about one model."""


@dataclass(frozen=True)
class ModelChoice(Checked):
    """The model, its dtype and its device."""

    model: str | None = _option(
        None, "MODEL", "Folder, hub id or .gguf file. Default: embedded.", "--model", "-m", envvar="LADE_MODEL"
    )
    dtype: str = _option(
        "auto",
        "NAME",
        "Weight dtype: bf16, fp16, fp32, fp64, or auto, the checkpoint's.",
        envvar="LADE_DTYPE",
        one_of=DTYPES,
    )
    device: str = _option(
        "auto", "NAME", "cpu, cuda, cuda:1, mps, ..., or auto: the best.", envvar="LADE_DEVICE", words=DEVICES
    )

    def __post_init__(self) -> None:
        if self.model == EMBEDDED and not Path(EMBEDDED).is_dir():  # overrides LADE_MODEL
            object.__setattr__(self, "model", None)


@dataclass(frozen=True)
class Loading(ModelChoice):
    """The model and all options of loading it; see `loading.load`."""

    revision: str | None = _expert(None, "REV", "Branch, tag or commit on the hub.")
    adapter: str | None = _expert(None, "PEFT", "PEFT adapter: folder or hub id.")
    device_map: str | None = _expert(
        None, "MAP", "Several devices: auto, balanced, ..., or JSON.", envvar="LADE_DEVICE_MAP"
    )
    quantization: str | None = _expert(
        None,
        "NAME",
        f"Quantize while loading: {', '.join(QUANTIZATIONS)}.",
        envvar="LADE_QUANTIZATION",
        words=QUANTIZATIONS,
    )
    weights: str | None = _expert(
        None, "NAME", "int8 or int4: round the weights for the CPU; lade pack shows the loss.", one_of=WEIGHTS
    )
    attn_implementation: str | None = _expert(
        None, "NAME", "Attention: sdpa, eager, ... Default: the model's.", words=("sdpa", "eager")
    )
    trust_remote_code: bool = _expert(False, "", "Run Python code of the checkpoint.", "--trust-remote-code")
    token: str | None = _expert(None, "TOKEN", "Hub token. Default: HF_TOKEN, or that of hf auth login.", repr=False)
    cache_dir: Path | None = _expert(
        None, "DIR", "Folder for downloads. Default: the hub's cache.", envvar="LADE_CACHE_DIR"
    )
    local_files_only: bool = _expert(
        False, "", "Do not access the network.", "--local-files-only", envvar="LADE_LOCAL_FILES_ONLY"
    )

    def check(self) -> None:
        """Raise `ConfigError` for values that are wrong for any model."""
        super().check()
        if self.model is None and self.revision is not None:
            raise ConfigError("revision", self.revision, "needs --model: the embedded model has no revisions")
        if self.weights is not None and self.quantization is not None:
            raise ConfigError("weights", self.weights, f"contradicts --quantization {self.quantization}")
        if self.device_map is not None and self.device != "auto":
            raise ConfigError("device-map", self.device_map, f"contradicts --device {self.device}")

    def check_split(self, *, pack: bool | None, invariant: bool | None) -> None:
        """Raise `ConfigError` for options that a model split over processes does not support."""
        given = {
            "device-map": self.device_map,
            "quantization": self.quantization,
            "weights": self.weights,
            "adapter": self.adapter,
            "pack": pack or None,
            "invariant": invariant or None,
        }
        for name, value in given.items():
            if value is not None:
                raise ConfigError(name, value, "not available for a model that torchrun splits over processes")

    @property
    def torch_dtype(self) -> str:
        """Name of the dtype in torch, or "auto"."""
        return ALIASES.get(self.dtype, self.dtype)

    @property
    def hub(self) -> dict[str, Any]:
        """Hub arguments of `from_pretrained` that were given."""
        given = {"revision": self.revision, "token": self.token, "cache_dir": self.cache_dir}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def variant(self) -> dict[str, str]:
        """Options that change the model's output, by their names; only those given."""
        names = ("revision", "adapter", "quantization", "weights", "attn_implementation")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def name(self) -> str:
        """Name of the model: a hub id, or the last part of a path."""
        if self.model is None:
            return EMBEDDED
        folder = folder_of(self.model)
        return folder.resolve().name if folder.exists() else self.model

    def label(self, *more: str) -> str:
        """Return the name with the variant and further words in parentheses, for records."""
        variant = ", ".join([*(f"{name} {value}" for name, value in self.variant.items()), *more])
        return f"{self.name} ({variant})" if variant else self.name

    def check_layout(self, pack: bool | None, *, invariant: bool | None) -> None:
        """Raise `ConfigError` if --no-pack or --invariant contradicts another option."""
        if self.weights is not None and pack is False:
            raise ConfigError("weights", self.weights, "contradicts --no-pack")
        if self.attn_implementation is not None and invariant:
            raise ConfigError("attn-implementation", self.attn_implementation, "contradicts --invariant")

    def with_model(self, model: str | None) -> Loading:
        """Return the options for a model given as an argument; None keeps `--model`."""
        return self if model is None else replace(self, model=model)

    def for_model(self, model: str) -> Loading:
        """Return the options for another model, such as a draft model, without revision and adapter."""
        return replace(self, model=model, revision=None, adapter=None)


def folder_of(name: str) -> Path:
    """Return the path of a folder, with ~ expanded if the home folder is known; it need not exist."""
    with suppress(RuntimeError):  # unknown user
        return Path(name).expanduser()
    return Path(name)


_RESERVED = frozenset(
    """
    conversation max_length padding return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs
    truncation
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
)
"""Arguments of `apply_chat_template` that are set here."""


_template_option = options_in("Chat template")


@dataclass(frozen=True)
class Template:
    """Chat template options."""

    raw: bool = _template_option(False, "", "Continue the text without a chat template.", "--raw")
    system: str | None = _template_option(None, "TEXT", "System message.")
    chat_template_kwargs: str | None = _template_option(
        None, "JSON", 'Template variables, such as {"enable_thinking": false}.'
    )

    def check(self) -> None:
        """Raise `ConfigError` or `InputError` for values that are wrong for any model."""
        for name, value in self.given.items():
            if self.raw:
                raise ConfigError(name, value, "contradicts --raw")
        if self.system is not None:
            check_text(self.system, "the text of --system")
        assert isinstance(self.arguments, dict)

    @property
    def given(self) -> dict[str, str]:
        """Options that need a chat template, by their names in the shell; only those given."""
        given = {"system": self.system, "chat-template-kwargs": self.chat_template_kwargs}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def arguments(self) -> dict[str, Any]:
        """Template variables for `apply_chat_template`; raises `ConfigError` for text that has none."""
        text, remedy = self.chat_template_kwargs, 'give an object, such as {"enable_thinking": false}'
        if text is None:
            return {}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise ConfigError("chat-template-kwargs", text[:60], f"not JSON ({problem}): {remedy}") from problem
        if not isinstance(found, dict):
            raise ConfigError("chat-template-kwargs", text[:60], f"not an object: {remedy}")
        for name in sorted(_RESERVED & set(found)):
            raise ConfigError("chat-template-kwargs", text[:60], f"{name!r} is not a template variable")
        return found

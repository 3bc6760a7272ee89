"""Options of the model to load, and of its chat template."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lade.cli.options.grouping import in_panel
from lade.cli.prompts import check_text
from lade.errors import ConfigError

PANEL = "Model"
EMBEDDED = "embedded"
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
DEVICES = ("auto", "cpu", "cuda", "mps")
QUANTIZATIONS = ("bnb-4bit", "bnb-8bit", "quanto-int4", "quanto-int8", "torchao-float8", "torchao-int8")
"""Names of `quantization.SCHEMES`, which cannot be imported without torch."""
WEIGHTS = ("int8",)
"""What `lade.pack` rounds weights to."""
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64", *ALIASES)


def _option(*names: str, metavar: str, envvar: str | None = None, words: tuple[str, ...] = (), help: str) -> Any:
    """An option of this panel; a shell completes it with these words."""
    offered: Any = {"autocompletion": lambda: list(words)} if words else {}
    return typer.Option(*names, metavar=metavar, envvar=envvar, help=help, rich_help_panel=PANEL, **offered)


NamedModel = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Folder or hub id; the same as --model.", show_default=False)
]
"""For commands that are about one model and nothing else."""


@dataclass(frozen=True)
class Loading:
    """Which model to load, and how; see `loading.load`.

    Attributes:
        model: a folder or a hub id; None, or "embedded", for the embedded model.
        revision: branch, tag or commit on the hub; None for its main branch.
        adapter: folder or hub id of a PEFT adapter to put into the model.
        dtype: one of `DTYPES`.
        device: "auto", or any name torch knows.
        device_map: as of `from_pretrained`, a word or JSON; None: all of the model goes to `device`.
        quantization: name of a scheme, see `quantization.SCHEMES`; None: as the checkpoint is.
        weights: one of `WEIGHTS`, for `lade.pack`; None: as the checkpoint is.
        attn_implementation: as of `from_pretrained`; None: transformers' choice.
        trust_remote_code: run the Python code that a checkpoint brings along.
        token: for the hub; None: as `hf auth login` left it, or HF_TOKEN.
        cache_dir: folder for downloads; None: the hub's own.
        local_files_only: download nothing.
    """

    model: Annotated[
        str | None,
        _option("--model", "-m", metavar="MODEL", envvar="LADE_MODEL", help="Folder or hub id. Default: embedded."),
    ] = None
    revision: Annotated[str | None, _option(metavar="REV", help="Branch, tag or commit on the hub.")] = None
    adapter: Annotated[str | None, _option(metavar="PEFT", help="PEFT adapter: folder or hub id.")] = None
    dtype: Annotated[
        str,
        _option(
            metavar="NAME", envvar="LADE_DTYPE", words=DTYPES, help="bf16, fp16, fp32, fp64, or auto: the checkpoint's."
        ),
    ] = "auto"
    device: Annotated[
        str,
        _option(
            metavar="NAME", envvar="LADE_DEVICE", words=DEVICES, help="cpu, cuda, cuda:1, mps, ..., or auto: the best."
        ),
    ] = "auto"
    device_map: Annotated[
        str | None, _option(metavar="MAP", envvar="LADE_DEVICE_MAP", help="Over several: auto, balanced, ..., or JSON.")
    ] = None
    quantization: Annotated[
        str | None,
        _option(metavar="NAME", envvar="LADE_QUANTIZATION", words=QUANTIZATIONS, help=f"{', '.join(QUANTIZATIONS)}."),
    ] = None
    weights: Annotated[
        str | None,
        _option(metavar="NAME", words=WEIGHTS, help="int8: packed in it for the CPU. See lade pack for what it costs."),
    ] = None
    attn_implementation: Annotated[
        str | None,
        _option(metavar="NAME", words=("sdpa", "eager"), help="sdpa, eager, ... Default: the model's."),
    ] = None
    trust_remote_code: Annotated[
        bool, _option("--trust-remote-code", metavar="", help="Run code that the checkpoint brings along.")
    ] = False
    token: Annotated[
        str | None, _option(metavar="TOKEN", help="For the hub. Default: HF_TOKEN, or hf auth login's.")
    ] = field(default=None, repr=False)
    cache_dir: Annotated[
        Path | None, _option(metavar="DIR", envvar="LADE_CACHE_DIR", help="For downloads. Default: the hub's own.")
    ] = None
    local_files_only: Annotated[
        bool, _option("--local-files-only", metavar="", envvar="LADE_LOCAL_FILES_ONLY", help="Download nothing.")
    ] = False

    def __post_init__(self) -> None:
        if self.model == EMBEDDED and not Path(EMBEDDED).is_dir():  # so that it can be had though LADE_MODEL is set
            object.__setattr__(self, "model", None)

    def check(self) -> None:
        """Raise `ConfigError` for what is wrong whatever the model."""
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", self.dtype, f"give one of {', '.join(DTYPES)}")
        if self.model is None and self.revision is not None:
            raise ConfigError("revision", self.revision, "the embedded model has none: add --model, or leave it out")
        if self.weights is not None and self.weights not in WEIGHTS:
            raise ConfigError("weights", self.weights, f"give {WEIGHTS[0]}, or leave it out")
        if self.weights is not None and self.quantization is not None:
            raise ConfigError("weights", self.weights, f"leave it out, or --quantization {self.quantization}")
        if self.device_map is not None and self.device != "auto":
            raise ConfigError("device-map", self.device_map, f"leave it out, or --device {self.device}")

    def check_split(self, *, pack: bool | None, invariant: bool) -> None:
        """Raise `ConfigError` for what cannot be had where several processes each load a part of the model."""
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
                raise ConfigError(name, value, "the model is split over the processes of torchrun: leave it out")

    @property
    def torch_dtype(self) -> str:
        """The dtype as torch calls it, or "auto"."""
        return ALIASES.get(self.dtype, self.dtype)

    @property
    def hub(self) -> dict[str, Any]:
        """Arguments of every `from_pretrained` that say where from; only what was given."""
        given = {"revision": self.revision, "token": self.token, "cache_dir": self.cache_dir}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def variant(self) -> dict[str, str]:
        """What makes it decode other texts than the model of that name by itself; only what was given."""
        names = ("revision", "adapter", "quantization", "weights", "attn_implementation")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def name(self) -> str:
        """What the model is called: a hub id as it is, of a folder the last part."""
        if self.model is None:
            return EMBEDDED
        folder = folder_of(self.model)
        return folder.resolve().name if folder.is_dir() else self.model

    @property
    def label(self) -> str:
        """The name for a record, with the variant."""
        return self.labelled()

    def labelled(self, *more: str) -> str:
        """The same with more words about how the model runs."""
        variant = ", ".join([*(f"{name} {value}" for name, value in self.variant.items()), *more])
        return f"{self.name} ({variant})" if variant else self.name

    def check_layout(self, pack: bool | None, *, invariant: bool) -> None:
        """Raise `ConfigError` where --no-pack or --invariant contradicts what else was given."""
        if self.weights is not None and pack is False:
            raise ConfigError("weights", self.weights, "it packs the model: leave it out, or --no-pack")
        if self.attn_implementation is not None and invariant:
            remedy = "an invariant model has an attention of its own: leave it out, or --invariant"
            raise ConfigError("attn-implementation", self.attn_implementation, remedy)

    def named(self, model: str | None) -> Loading:
        """The same for a model that was named as an argument, if one was."""
        return self if model is None else replace(self, model=model)

    def of(self, model: str) -> Loading:
        """The same for another model, such as one that drafts: it has neither this revision nor this adapter."""
        return replace(self, model=model, revision=None, adapter=None)


def folder_of(name: str) -> Path:
    """The folder of that name, which need not exist; ~ is the home folder where there is one."""
    with suppress(RuntimeError):  # of a user who is not known here
        return Path(name).expanduser()
    return Path(name)


def command_line() -> list[str]:
    """What this process was called with, for a record that others may read: without the token."""
    words = ["lade", *sys.argv[1:]]
    for place, word in enumerate(words):
        if word.startswith("--token="):
            words[place] = "--token=..."
        elif word == "--token" and place + 1 < len(words):
            words[place + 1] = "..."
    return words


TEMPLATE_PANEL = "Chat template"
_OURS = frozenset(
    """
    conversation max_length padding return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs
    truncation
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
)
"""Arguments of `apply_chat_template` that decide what comes back, not what the prompt is."""


_template_option = in_panel(TEMPLATE_PANEL)


@dataclass(frozen=True)
class Template:
    """How a text becomes a prompt.

    Attributes:
        raw: the model continues the text as it is, even if it has a chat template.
        system: a system message to put before every conversation that has none.
        chat_template_kwargs: JSON, what the template is given besides the messages.
    """

    raw: Annotated[
        bool, _template_option("--raw", help="Continue the text as it is, though the model has a chat template.")
    ] = False
    system: Annotated[str | None, _template_option(metavar="TEXT", help="System message.")] = None
    chat_template_kwargs: Annotated[
        str | None, _template_option(metavar="JSON", help='For it: {"enable_thinking": false}, ...')
    ] = None

    def check(self) -> None:
        """Raise `ConfigError` or `InputError` for what is wrong whatever the model."""
        for name, value in self.given.items():
            if self.raw:
                raise ConfigError(name, value, "--raw uses no chat template: leave out one of them")
        if self.system is not None:
            check_text(self.system, "the text of --system")
        assert isinstance(self.arguments, dict)

    @property
    def given(self) -> dict[str, str]:
        """What only a chat template can use, as on the command line; only what was given."""
        given = {"system": self.system, "chat-template-kwargs": self.chat_template_kwargs}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments for `apply_chat_template`.

        Raises:
            ConfigError: they are no JSON object, or not for the template.
        """
        text, remedy = self.chat_template_kwargs, 'give an object, such as {"enable_thinking": false}'
        if text is None:
            return {}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise ConfigError("chat-template-kwargs", text[:60], f"it is no JSON ({problem}): {remedy}") from problem
        if not isinstance(found, dict):
            raise ConfigError("chat-template-kwargs", text[:60], f"it is no object: {remedy}")
        for name in sorted(_OURS & set(found)):
            raise ConfigError("chat-template-kwargs", text[:60], f"{name!r} is not the template's: leave it out")
        return found


WITHOUT = Template()
"""The model's own chat template, and nothing besides."""

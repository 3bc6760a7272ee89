"""Loading of the model of `lade serve` and `lade batch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lade import Memory, supports
from lade.backends.processes.team import dismiss
from lade.cli.encoder import encode
from lade.cli.loading import SAMPLING_FIELDS, LoadedModel, prepare_split_model, with_memory
from lade.cli.loading import load as load_model
from lade.cli.options.decoding import Speed
from lade.cli.options.model import Loading
from lade.cli.terminal import Terminal
from lade.config import Lookahead, LookaheadConfig
from lade.errors import UnsupportedModelError
from lade.server.served_model import ServedModel


def load_split(loading: Loading, speed: Speed, term: Terminal, processes: int) -> LoadedModel:
    """Load the model as each of its processes does."""
    return load_model(loading, term=term, pack=speed.pack, images=None, invariant=speed.invariant, processes=processes)


def load(loading: Loading, speed: Speed, chat_template: str | None, term: Terminal, processes: int = 1) -> ServedModel:
    """Load the model, in a thread of a server that listens already, in the first of the processes that share it.

    The file of a draft memory need not exist. A `chat_template` takes the place of the model's own.

    Raises:
        ConfigError, InputError, UnsupportedModelError: an option is wrong, or the model cannot be loaded or served.
    """
    loaded = load_split(loading, speed, term, processes)
    if processes > 1:
        prepare_split_model(loaded.model)
    support = supports(loaded.model)
    if not support:
        raise UnsupportedModelError(str(support), "lade generate decodes it plainly, a prompt at a time")
    if chat_template is not None:
        loaded.tokenizer.chat_template = chat_template
    lookahead = _lookahead(loaded, speed)
    return ServedModel(
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        sampling={name: value for name, value in loaded.checkpoint_defaults.items() if name in SAMPLING_FIELDS},
        context=loaded.context,
        lookahead=lookahead,
        encode_images=_image_encoder(loaded),
        save=_saver(lookahead, speed, loaded),
        close=partial(dismiss, loaded.model),
    )


def _lookahead(loaded: LoadedModel, speed: Speed) -> Lookahead:
    config = speed.lookahead(new_memory=True)
    if speed.memory is None or speed.memory.exists():
        return with_memory(loaded, config, speed.memory)
    assert isinstance(config, LookaheadConfig), "Speed.lookahead sees to it"
    return replace(config, memory=Memory())


def _saver(lookahead: Lookahead, speed: Speed, loaded: LoadedModel) -> Callable[[], None] | None:
    """Return the function that saves the draft memory; None without `--memory`."""
    memory = lookahead.memory if isinstance(lookahead, LookaheadConfig) else None
    if speed.memory is None or not isinstance(memory, Memory):
        return None
    return partial(memory.save, speed.memory, loaded.tokenizer)


def _image_encoder(loaded: LoadedModel) -> Callable[..., tuple[list[int], Mapping[str, Any]]] | None:
    """Return the encoder of messages with images; None for text models."""
    if getattr(loaded.model.config, "vision_config", None) is None:
        return None

    def encoded(messages: Any, arguments: Mapping[str, Any]) -> tuple[list[int], Mapping[str, Any]]:
        made = encode(loaded, messages, arguments)
        return made.ids, made.media

    return encoded

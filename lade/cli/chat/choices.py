"""How a chat chooses tokens: as the checkpoint asks, unless the command line says otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lade.cli.options.decoding import Choices
from lade.errors import ConfigError

if TYPE_CHECKING:
    from lade.cli.loading.loaded_model import LoadedModel

_NO_BEAMS = "a chat shows answers as they come, beams only when complete: leave it out, or use lade generate"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


def check(choices: Choices, *, greedy: bool) -> None:
    """Find out before a model is loaded what is wrong with the options.

    Args:
        choices: as the command line has them.
        greedy: whether it has `--greedy`.

    Raises:
        ConfigError, InputError: out of range, or in contradiction.
    """
    replace(choices, do_sample=True).settled()  # whether there will be sampling is not known yet
    if choices.num_beams > 1:
        raise ConfigError("num-beams", choices.num_beams, _NO_BEAMS)
    if greedy and choices.do_sample:
        raise ConfigError("greedy", True, "it contradicts --do-sample: leave one of them out")
    for name in _SAMPLING:
        value = getattr(choices, name)
        if greedy and value is not None:
            raise ConfigError(name.replace("_", "-"), value, "only sampling uses it: leave it out, or --greedy")


def chosen(choices: Choices, loaded: LoadedModel, *, greedy: bool) -> Choices:
    """The same, sampling where options or checkpoint ask for it, with a seed then.

    Raises:
        ConfigError: an option that only sampling uses, where there is none.
    """
    return replace(choices, do_sample=choices.do_sample or (_asks(loaded) and not greedy)).settled()


def described(choices: Choices, loaded: LoadedModel, *, greedy: bool, do_sample: bool) -> str:
    """One line for the start of a chat.

    Args:
        choices: settled ones.
        loaded: has the checkpoint's checkpoint_defaults.
        greedy: whether the command line has `--greedy`.
        do_sample: whether it has `--do-sample`.
    """
    if choices.do_sample:
        from lade.cli.loading.generation_defaults import SAMPLING_FIELDS
        from lade.cli.run import generate_arguments

        given = generate_arguments(loaded, choices)
        values = ", ".join(f"{name} {given[name]:g}" for name in SAMPLING_FIELDS if name in given)
        limits = f": {values}" if values else ""
        return (
            f"samples as --do-sample asks{limits}"
            if do_sample
            else f"samples as the checkpoint asks{limits} · --greedy: not"
        )
    if greedy:
        return "takes the likeliest tokens as --greedy asks" + (
            "; the checkpoint would sample" if _asks(loaded) else ""
        )
    return "takes the likeliest tokens, as the checkpoint asks for no sampling · --do-sample: samples"


def _asks(loaded: LoadedModel) -> bool:
    return loaded.checkpoint_defaults.get("do_sample") is True

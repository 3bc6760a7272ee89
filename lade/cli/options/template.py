"""Options about the chat template that prompts are put into."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from lade.cli.options.grouping import in_panel
from lade.cli.prompts import check_text
from lade.errors import ConfigError

PANEL = "Chat template"
_OURS = frozenset(
    """
    conversation max_length padding return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs
    truncation
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
)
"""Arguments of `apply_chat_template` that decide what comes back, not what the prompt is."""


_option = in_panel(PANEL)


@dataclass(frozen=True)
class Template:
    """How a text becomes a prompt.

    Attributes:
        raw: the model continues the text as it is, even if it has a chat template.
        system: a system message to put before every conversation that has none.
        chat_template_kwargs: JSON, what the template is given besides the messages.
    """

    raw: Annotated[bool, _option("--raw", help="Continue the text as it is, though the model has a chat template.")] = (
        False
    )
    system: Annotated[str | None, _option(metavar="TEXT", help="System message.")] = None
    chat_template_kwargs: Annotated[
        str | None, _option(metavar="JSON", help='For it: {"enable_thinking": false}, ...')
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

"""Prompts as token ids: through the model's chat template where it has one, and as they are where it has none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lade.cli.images import ImagePrompt, content, encode, open_image
from lade.cli.loading.loaded_model import LoadedModel
from lade.cli.options.template import Template
from lade.cli.prompts import Messages, Prompt
from lade.cli.terminal import one_line
from lade.errors import ConfigError, InputError


class Encoder:
    """Encodes the prompts of a command.

    Args:
        loaded: has the tokenizer.
        template: checked options.

    Attributes:
        templated: whether texts are put into a chat template.

    Raises:
        ConfigError: an option needs a template that the model has not.
    """

    def __init__(self, loaded: LoadedModel, template: Template) -> None:
        self._loaded, self._template = loaded, template
        self.templated = not template.raw and bool(getattr(loaded.tokenizer, "chat_template", None))
        for name, value in template.given.items():
            if not self.templated:
                raise ConfigError(name, value, f"{loaded.name!r} has no chat template: leave it out")

    @property
    def settings(self) -> dict[str, Any]:
        """What makes its prompts other ones than the texts as they are; for records."""
        return {"chat_template": True, **self._template.given} if self.templated else {}

    def __call__(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt, special tokens included.

        Raises:
            InputError: the model cannot continue it, or its template does not take it.
        """
        if not self.templated:
            if prompt.messages is not None:
                why = "--raw was given" if self._template.raw else f"{self._loaded.name!r} has no chat template"
                raise InputError(f'messages need a chat template, and {why}: give a text under "prompt"')
            return self._loaded.encode(prompt.text)
        ids = self._templated(prompt.messages or [{"role": "user", "content": prompt.text}])
        self._loaded.check(ids)
        return ids

    def with_images(self, prompt: Prompt, files: Sequence[Path]) -> ImagePrompt:
        """The same of a text that comes after images.

        Raises:
            InputError: an image cannot be read, or the model's processor does not take it.
        """
        said = content(prompt.text, [open_image(path) for path in files])
        return encode(self._loaded, self._instructed([{"role": "user", "content": said}]), self._template.arguments)

    def _templated(self, messages: Messages) -> list[int]:
        messages = self._instructed(messages)
        goes_on = messages[-1]["role"] == "assistant"  # then its last message is continued, not answered
        kind = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        try:
            ids: list[int] = self._loaded.tokenizer.apply_chat_template(
                messages, **{**kind, **self._template.arguments}, tokenize=True, return_dict=False
            )
        except Exception as problem:
            reason = one_line(problem, 240)
            raise InputError(
                f"the chat template of {self._loaded.name!r} refuses the prompt ({reason}): mend it, or add --raw"
            ) from problem
        return ids

    def _instructed(self, messages: Messages) -> Messages:
        """Messages after the system message, if one was given."""
        system = self._template.system
        if system is None:
            return messages
        if messages[0]["role"] == "system":
            raise InputError("the conversation has a system message of its own: leave out --system")
        return [{"role": "system", "content": system}, *messages]

"""Prompts and their images as model inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from lade import ConfigError, InputError
from lade.cli.loading import LoadedModel
from lade.cli.options.model import Template
from lade.cli.prompts import Messages, Prompt
from lade.cli.terminal import one_line
from lade.files import IMAGE_FORMATS

_TOKEN_ARGUMENTS = ("input_ids", "attention_mask")
_FORMATS = f"{', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]}"


class ImagePrompt(NamedTuple):
    """A prompt, with images or without."""

    ids: list[int]  # with placeholders for the images
    media: Mapping[str, Any]  # arguments of `generate`: pixels and their layout


def open_image(path: Path) -> Any:
    """Read an image as RGB; raises `InputError` without Pillow, and for a file that is no image."""
    if find_spec("PIL") is None:
        raise InputError(f"image {str(path)!r} cannot be read without Pillow: run  pip install pillow")
    from PIL import Image

    try:
        with Image.open(path, formats=IMAGE_FORMATS) as picture:
            return picture.convert("RGB")
    except Exception as problem:
        reason = getattr(problem, "strerror", None) or one_line(problem, 120)
        raise InputError(f"image {str(path)!r} cannot be read: {reason}; give a {_FORMATS} file") from problem


def content(text: str, images: Sequence[Any]) -> list[dict[str, Any]]:
    """Return message content with images before a text, in the format of chat templates."""
    return [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]


def encode(loaded: LoadedModel, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> ImagePrompt:
    """Apply the chat template of the model's processor to messages; those with images were made by `content`.

    Raises:
        InputError: there is no processor or chat template, or it refuses or ignores the images.
    """
    shown = []
    for each in messages:  # templates of such models expect a list of parts
        text = each["content"]
        shown.append({**each, "content": [{"type": "text", "text": text}] if isinstance(text, str) else text})
    given, processor = {"add_generation_prompt": True, **arguments}, loaded.processor()
    try:
        made = processor.apply_chat_template(shown, **given, tokenize=True, return_dict=True, return_tensors="pt")
    except Exception as problem:
        raise InputError(f"the processor of {loaded.name!r} refuses the prompt ({one_line(problem, 240)})") from problem
    made = made.to(loaded.model.device, loaded.model.dtype)  # floats alone change their dtype
    media = {name: value for name, value in made.items() if name not in _TOKEN_ARGUMENTS}
    if all(getattr(value, "shape", None) == made["input_ids"].shape for value in media.values()):  # types of tokens
        raise InputError(f"the chat template of {loaded.name!r} ignores images")
    ids: list[int] = made["input_ids"][0].tolist()
    loaded.check(ids, media=True)
    return ImagePrompt(ids, media)


class Encoder:
    """Encodes prompts as token ids, `templated` if they are formatted with a chat template.

    Raises:
        ConfigError: an option needs a chat template, and the model has none.
    """

    def __init__(self, loaded: LoadedModel, template: Template) -> None:
        self._loaded, self._template = loaded, template
        self.templated = not template.raw and bool(getattr(loaded.tokenizer, "chat_template", None))
        for name, value in template.given.items():
            if not self.templated:
                raise ConfigError(name, value, f"{loaded.name!r} has no chat template")

    def __call__(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt; raises `InputError` if it is empty, too long, or refused by the chat template."""
        if not self.templated:
            if prompt.messages is not None:
                why = "--raw was given" if self._template.raw else f"{self._loaded.name!r} has no chat template"
                raise InputError(f'messages need a chat template, and {why}: give a text under "prompt"')
            ids: list[int] = self._loaded.tokenizer(prompt.text)["input_ids"]
        else:
            messages = self._with_system(prompt.messages or [{"role": "user", "content": prompt.text}])
            try:
                ids = self.apply_template(messages)
            except Exception as problem:
                why = f"the chat template of {self._loaded.name!r} refuses the prompt ({one_line(problem, 240)})"
                raise InputError(f"{why}: change it, or add --raw") from problem
        self._loaded.check(ids)
        return ids

    def with_images(self, prompt: Prompt, files: Sequence[Path]) -> ImagePrompt:
        """Return the prompt of a text after images; raises `InputError` for a model that takes none."""
        message = content(prompt.text, [open_image(path) for path in files])
        return encode(self._loaded, self._with_system([{"role": "user", "content": message}]), self._template.arguments)

    def apply_template(self, messages: Messages) -> list[int]:
        """Return the ids of a conversation to answer; raises whatever its chat template raises."""
        continued = messages[-1]["role"] == "assistant"  # its last message is continued, not answered
        kind = {"add_generation_prompt": not continued, "continue_final_message": continued}
        ids: list[int] = self._loaded.tokenizer.apply_chat_template(
            messages, **{**kind, **self._template.arguments}, tokenize=True, return_dict=False
        )
        return ids

    def _with_system(self, messages: Messages) -> Messages:
        """Return the messages, after the system message if one was given."""
        system = self._template.system
        if system is None:
            return messages
        if messages[0]["role"] == "system":
            raise InputError("the conversation has a system message already: leave out --system")
        return [{"role": "system", "content": system}, *messages]

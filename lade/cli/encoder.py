"""Prompts and their images as model inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lade.cli.loading.load import LoadedModel
from lade.cli.options.model import Template
from lade.cli.prompts import Messages, Prompt
from lade.cli.terminal import one_line
from lade.errors import ConfigError, InputError
from lade.model.prepared import IMAGE_FORMATS, holds_media

_MADE_HERE = ("input_ids", "attention_mask")
_FORMATS = f"{', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]}"


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with images in it.

    Attributes:
        ids: of its tokens; placeholders stand for the images.
        media: the other arguments of `generate`: pixels, and what says where they belong.
    """

    ids: list[int]
    media: Mapping[str, Any] = field(default_factory=dict)


def open_image(path: Path) -> Any:
    """A picture in memory, in RGB.

    Raises:
        InputError: Pillow is not installed, or the file cannot be read as an image.
    """
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
    """The content of a message that shows images and then says something, as chat templates take it."""
    return [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]


def encode(
    loaded: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    check: Callable[[str], None] | None = None,
) -> ImagePrompt:
    """Put a conversation with images into the chat template of the model's processor.

    Args:
        loaded: has the processor.
        messages: those with images have a `content` as of `content`.
        arguments: what the template is given besides.
        check: is called with the text before it is tokenised, and may raise what it likes.

    Raises:
        InputError: there is no processor, no chat template, or they do not take the images.
    """
    shown = [{**each, "content": _parts(each["content"])} for each in messages]
    given = {"add_generation_prompt": True, **arguments}
    if check is not None:
        check(_processed(loaded, shown, **given, tokenize=False))
    made = _processed(loaded, shown, **given, tokenize=True, return_dict=True, return_tensors="pt")
    media = {name: value for name, value in made.items() if name not in _MADE_HERE}
    if not holds_media(media):
        raise InputError(f"the chat template of {loaded.name!r} leaves images out: leave out --image")
    ids: list[int] = made["input_ids"][0].tolist()
    loaded.check(ids)
    return ImagePrompt(ids, {name: _placed(value, loaded.model) for name, value in media.items()})


def _processed(loaded: LoadedModel, shown: Sequence[Mapping[str, Any]], **arguments: Any) -> Any:
    processor = loaded.processor()
    try:
        return processor.apply_chat_template(shown, **arguments)
    except Exception as problem:
        raise InputError(f"the processor of {loaded.name!r} refuses the prompt ({one_line(problem, 240)})") from problem


def _parts(said: Any) -> Any:
    """All contents alike: templates of such models expect parts."""
    return [{"type": "text", "text": said}] if isinstance(said, str) else said


def _placed(value: Any, model: Any) -> Any:
    """Pixels on the model's device and in its dtype, numbers as they are."""
    if not hasattr(value, "to"):
        return value
    return value.to(model.device, model.dtype) if value.is_floating_point() else value.to(model.device)


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

"""A conversation of `lade chat`: messages, token ids, KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lade import InputError, TreeCache, supports
from lade.cli.encoder import Encoder, ImagePrompt, content, encode, open_image
from lade.cli.loading import LoadedModel
from lade.cli.options.model import Template
from lade.cli.prompts import Messages
from lade.cli.run import Generation, stop_ids
from lade.cli.terminal import one_line


@dataclass(frozen=True)
class Turn:
    """A turn of the user that waits for its answer."""

    text: str
    prompt: list[int]  # ids of the conversation including this turn, which the answer continues
    messages: Messages  # of the earlier turns
    ids: list[int]  # of the conversation before this turn
    images: Mapping[int, list[Any]]  # by message number, those of this turn included
    media: Mapping[str, Any]  # images as arguments of `generate`


class Conversation:
    """The turns so far, as messages and as token ids.

    With a chat template the conversation is templated anew each turn, and the cache keeps the common prefix. Without
    one, the turns are one text. A conversation with images is fed anew each turn, since `generate` takes the pixels
    of all images or of none. The template's system message is ignored.

    Raises:
        ConfigError: there are template variables, and the model has no chat template.
    """

    def __init__(self, loaded: LoadedModel, template: Template) -> None:
        self._loaded, self._arguments = loaded, template.arguments
        self._encoder = Encoder(loaded, replace(template, system=None))
        self.templated = self._encoder.templated
        support = supports(loaded.model)
        self._caches = bool(support) and support.require().attends  # states do not report their length
        self.system: str | None = None
        self.reset()

    def reset(self) -> None:
        """Drop all turns; the system prompt stays."""
        self._turns: Messages = []
        self._ids: list[int] = []
        self._ids_before: list[int] = []  # ids of the conversation before its last turn
        self._images: Mapping[int, list[Any]] = {}
        self._next_images: list[Any] = []  # images for the next turn
        self.drop_cache()

    def drop_cache(self) -> None:
        """Start with an empty cache, as the content of the old one is unknown."""
        self._fed: list[int] = []  # ids that were fed; the cache may hold fewer
        self.cache: TreeCache | None = TreeCache() if self._caches else None

    @property
    def turns(self) -> int:
        """Number of answered turns."""
        return len(self._turns) // 2

    @property
    def tokens(self) -> int:
        """Length of the conversation in tokens."""
        return len(self._ids)

    @property
    def cached(self) -> int:
        """Number of tokens in the cache."""
        return 0 if self.cache is None else self.cache.get_seq_length()

    def set_system(self, system: str | None) -> None:
        """Set or remove the system prompt, from the next turn on; raises `InputError` where that has no effect."""
        if system is not None:
            if not self.templated:
                raise InputError("a system prompt needs a chat template: send it as a turn")
            probe = [{"role": "user", "content": "?"}]
            if self._templated([{"role": "system", "content": system}, *probe]) == self._templated(probe):
                raise InputError("the model's chat template ignores system prompts: send it as a turn")
        self.system = system

    def attach_image(self, path: Path) -> None:
        """Attach an image to the next turn; raises `InputError` if it cannot be read, or the model takes none."""
        if not self.templated:
            raise InputError("images need a chat template")
        self._loaded.processor()
        self._next_images.append(open_image(path))

    def next_turn(self, text: str) -> Turn:
        """Return the user's next turn, and crop the cache to the common prefix.

        Nothing else changes before `add_answer`, so that a failed turn leaves the conversation as it was. Raises
        `InputError` if the turn exceeds the model's context, or the chat template refuses it.
        """
        return self._turn(text, self._turns, self._ids, self._next_images)

    def retry(self) -> Turn:
        """Return the last turn again; its answer will replace the one it has. Without one raise `InputError`."""
        if not self._turns:
            raise InputError("there is no answer to retry yet")
        shown = self._images.get(len(self._turns) - 2, [])
        return self._turn(self._turns[-2]["content"], self._turns[:-2], self._ids_before, shown)

    def add_answer(self, turn: Turn, answer: Generation) -> None:
        """Add a turn and its answer, complete or not, to the conversation."""
        reply: str = self._loaded.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        if self.templated:
            reply = reply.strip()
        own = [{"role": "user", "content": turn.text}, {"role": "assistant", "content": reply}]
        self._turns, self._ids_before, self._images = [*turn.messages, *own], turn.ids, turn.images
        if turn.images.get(len(turn.messages)) is self._next_images:
            self._next_images = []
        self._ids = self._fed = [*turn.prompt, *answer.token_ids]
        if answer.torn:
            self.drop_cache()  # an aborted pass may have updated some layers only

    def _turn(self, text: str, messages: Messages, ids: list[int], shown: list[Any]) -> Turn:
        message = {"role": "user", "content": text}
        images = {number: each for number, each in self._images.items() if number < len(messages)}
        if shown:
            images[len(messages)] = shown
        if images:
            shown_turns: list[Mapping[str, Any]] = [
                {**turn, "content": content(turn["content"], images[number])} if number in images else turn
                for number, turn in enumerate([*messages, message])
            ]
            prompt = encode(self._loaded, [*self._system(), *shown_turns], self._arguments)
        elif self.templated:
            prompt = ImagePrompt(self._templated([*self._system(), *messages, message]), {})
        else:
            prompt = ImagePrompt(self._continued(ids, text), {})
        context = self._loaded.context
        if context and len(prompt.ids) >= context:
            raise InputError(
                f"with this turn the conversation has {len(prompt.ids)} tokens, and the model's context is {context}: "
                "say something shorter, or give /reset"
            )
        self._loaded.check(prompt.ids)
        if images:
            self.drop_cache()
        self._crop(prompt.ids)
        return Turn(text, prompt.ids, messages, ids, images, prompt.media)

    def _system(self) -> Messages:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _templated(self, messages: Messages) -> list[int]:
        try:
            return self._encoder.apply_template(messages)
        except Exception as problem:
            system = any(message["role"] == "system" for message in messages)
            remedy = "try /reset, or /system without a text" if system else "try /reset"
            raise InputError(f"the model's chat template refuses this ({one_line(problem)}): {remedy}") from problem

    def _continued(self, ids: list[int], text: str) -> list[int]:
        tokenizer = self._loaded.tokenizer
        if not ids:
            first: list[int] = tokenizer(text)["input_ids"]
            return first
        before = ids[:-1] if ids[-1] in stop_ids(self._loaded.model) else ids
        return [*before, *tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _crop(self, ids: list[int]) -> None:
        """Crop the cache to the common prefix with `ids`, without the last token, which has to be fed."""
        if self.cache is None:
            return
        pairs = enumerate(zip(self._fed, ids, strict=False))
        shared = next((i for i, (old, new) in pairs if old != new), min(len(self._fed), len(ids)))
        # A stopped plain decoder may have cached a token that was never shown, beyond `_fed`; it is cropped too.
        keep = min(shared, len(ids) - 1)
        if self.cached > keep:
            self.cache.crop(keep - self.cached)

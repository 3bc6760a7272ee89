"""A conversation: its messages, its file, its KV cache.

`{"model": "org/name", "messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}, ...]}`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lade.cli.encoder import ImagePrompt, content, encode, open_image
from lade.cli.loading.load import LoadedModel
from lade.cli.options.model import WITHOUT, Template
from lade.cli.run import Generation
from lade.cli.terminal import one_line
from lade.errors import ConfigError, InputError
from lade.model.facts import cache_name
from lade.model.kv_cache import TreeCache
from lade.model.prepared import placeholder_ids
from lade.model.support.supports import supports, unwrap

_REMEDY = "give a file that /save wrote"


def save(path: Path, messages: Sequence[dict[str, str]], model: str) -> None:
    """Write a conversation: the file holds the old one or the new one, whole.

    Args:
        path: may be that of an earlier conversation, but of nothing else.
        messages: at least one turn.
        model: its name, for the record.

    Raises:
        InputError: there is something else, or the file cannot be written.
    """
    if path.exists():
        try:
            load(path)
        except InputError as problem:
            raise InputError(f"{str(path)!r} is there and holds no conversation: give another name") from problem
    text = json.dumps({"model": model, "messages": list(messages)}, ensure_ascii=False, indent=1) + "\n"
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as problem:
        aside.unlink(missing_ok=True)
        reason = problem.strerror or str(problem)
        raise InputError(f"{str(path)!r} cannot be written: {reason}; give another name") from problem


def load(path: Path) -> list[dict[str, str]]:
    """The messages of a file: a system prompt or none, then turns of user and assistant, each one answered.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise InputError(f"{str(path)!r} cannot be read: {problem.strerror or problem}; check the path") from problem
    except (ValueError, RecursionError) as problem:  # ValueError: also what is not UTF-8
        raise InputError(f"{str(path)!r} is no JSON: {_REMEDY}") from problem
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list):
        raise InputError(f'{str(path)!r} has no list under "messages": {_REMEDY}')
    return _checked(messages, str(path))


def _checked(messages: list[Any], name: str) -> list[dict[str, str]]:
    """Without whatever else a message may hold."""
    offset = 1 if messages and isinstance(messages[0], dict) and messages[0].get("role") == "system" else 0
    for number, message in enumerate(messages):
        wanted = "system" if number < offset else ("user", "assistant")[(number - offset) % 2]
        if not isinstance(message, dict) or message.get("role") != wanted:
            raise InputError(f"{name!r}: message {number + 1} is none of the role {wanted}: {_REMEDY}")
        text = message.get("content")
        if not isinstance(text, str):
            raise InputError(f"{name!r}: message {number + 1} has no text as its content: {_REMEDY}")
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise InputError(f"{name!r}: message {number + 1} is not Unicode: {_REMEDY}") from problem
    if (len(messages) - offset) % 2:
        raise InputError(f"{name!r} ends with a turn that has no answer: {_REMEDY}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


Message = dict[str, str]
"""With the keys `role` ("system", "user" or "assistant") and `content`."""
MIXING = frozenset({"moe_mm_token_type_ids"})
"""What tells images from text beyond the prompt's own tokens: experts go by it, so it cannot be left out of a turn."""


@dataclass(frozen=True)
class Turn:
    """A turn of the user that waits for its answer.

    Attributes:
        text: what the user says.
        prompt: ids of the conversation with it: what the answer continues.
        messages: of the turns before it.
        ids: of the conversation before it.
        images: those shown with the user's turns, this one included, by number of the message.
        media: the same as arguments of `generate`; none where the cache holds them.
    """

    text: str
    prompt: list[int]
    messages: list[Message]
    ids: list[int]
    images: Mapping[int, list[Any]] = field(default_factory=dict)
    media: Mapping[str, Any] = field(default_factory=dict)


class Conversation:
    """The turns so far as token ids and as messages.

    With a chat template every turn is templated again, and of the cache what its ids begin with is kept. Without one
    the turns are one text that the model continues. Where the cache holds all images, a new turn is fed as text alone;
    a turn with a further image has the conversation read anew, since pixels are given for all images or none.

    Args:
        loaded: the model and its tokenizer.
        template: checked options; the system message is not taken from them.

    Raises:
        ConfigError: there are arguments for a chat template, and the model has none.
    """

    def __init__(self, loaded: LoadedModel, template: Template = WITHOUT) -> None:
        self._loaded, self._arguments = loaded, template.arguments
        self.templated = not template.raw and bool(getattr(loaded.tokenizer, "chat_template", None))
        if self._arguments and not self.templated:
            remedy = f"{loaded.name!r} has no chat template: leave it out"
            raise ConfigError("chat-template-kwargs", template.chat_template_kwargs, remedy)
        goes_on = cache_name(unwrap(loaded.model)) == "past_key_values"  # others do not tell how much they hold
        self._caches = goes_on and bool(supports(loaded.model))
        self.system: str | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all turns; the system prompt stays."""
        self._turns: list[Message] = []
        self._ids: list[int] = []
        self._before: list[int] = []  # ids of the conversation before its last turn
        self._images: Mapping[int, list[Any]] = {}
        self._waiting: list[Any] = []  # images that the next turn shows
        self.forget_cache()

    def forget_cache(self) -> None:
        """Begin with an empty cache: what the old one holds is not known."""
        self._held: list[int] = []  # ids that the cache was made from; it may hold fewer of them
        self._held_images: Mapping[int, list[Any]] = {}  # likewise
        self.cache: TreeCache | None = TreeCache() if self._caches else None

    @property
    def messages(self) -> list[Message]:
        """All of them, the system prompt first."""
        return [*self._system(), *self._turns]

    @property
    def turns(self) -> int:
        """How many were said and answered."""
        return len(self._turns) // 2

    @property
    def tokens(self) -> int:
        """Length of the conversation."""
        return len(self._ids)

    @property
    def cached(self) -> int:
        """How many of its tokens the cache holds."""
        return 0 if self.cache is None else self.cache.get_seq_length()

    def instruct(self, system: str | None) -> None:
        """Set the system prompt, or none; it holds from the next turn on.

        Raises:
            InputError: the model has no chat template, or the template has no place for it; nothing has changed.
        """
        if system is not None:
            self._check_system(system)
        self.system = system

    @property
    def has_images(self) -> bool:
        """Whether any were shown."""
        return bool(self._images)

    def show(self, path: Path) -> None:
        """Show an image with the next turn.

        Raises:
            InputError: it cannot be read, or the model takes none.
        """
        if not self.templated:
            raise InputError("without a chat template an image has no place in the conversation")
        self._loaded.processor()
        self._waiting.append(open_image(path))

    def ask(self, text: str) -> Turn:
        """The user's next turn; the cache is cropped to what it shares with its ids.

        Nothing else changes before `answered`: a turn that cannot be answered leaves the conversation as it was.

        Raises:
            InputError: it does not fit into the model's context, or the chat template refuses it.
        """
        return self._turn(text, self._turns, self._ids, self._waiting)

    def retry(self) -> Turn:
        """The last turn once more: its answer will replace the one that it has.

        Raises:
            InputError: there is none.
        """
        if not self._turns:
            raise InputError("nothing was said yet: there is no answer to try again")
        shown = self._images.get(len(self._turns) - 2, [])
        return self._turn(self._turns[-2]["content"], self._turns[:-2], self._before, shown)

    def answered(self, turn: Turn, answer: Generation) -> None:
        """Take a turn and its answer, finished or not, into the conversation."""
        reply: str = self._loaded.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        if self.templated:
            reply = reply.strip()
        own = [{"role": "user", "content": turn.text}, {"role": "assistant", "content": reply}]
        self._turns, self._before, self._images = [*turn.messages, *own], turn.ids, turn.images
        if turn.images.get(len(turn.messages)) is self._waiting:
            self._waiting = []
        self._ids = self._held = [*turn.prompt, *answer.token_ids]
        self._held_images = turn.images
        if answer.torn:
            self.forget_cache()  # a pass was broken off: its layers may disagree

    def take(self, messages: Sequence[Message]) -> None:
        """Go on with another conversation in place of this one.

        Args:
            messages: a system prompt or none, then turns of user and assistant.

        Raises:
            InputError: it is longer than the model's context, or the model has no place for its system prompt; nothing
                has changed.
        """
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        if system is not None:
            self._check_system(system)
        turns = list(messages if system is None else messages[1:])
        before, ids = (self._encoded(system, each) for each in (turns[:-2], turns))
        self._check_length(ids, "the conversation", "load a shorter one")
        self.system = system
        self.reset()
        self._turns, self._before, self._ids = turns, before, ids

    def _turn(self, text: str, messages: list[Message], ids: list[int], shown: list[Any]) -> Turn:
        said = {"role": "user", "content": text}
        images = {number: each for number, each in self._images.items() if number < len(messages)}
        if shown:
            images[len(messages)] = shown
        if images:
            prompt = self._seen([*messages, said], images)
        else:
            prompt = ImagePrompt(
                self._templated([*self._system(), *messages, said]) if self.templated else self._continued(ids, text)
            )
        self._check_length(prompt.ids, "with this turn the conversation", "say something shorter, or give /reset")
        self._loaded.check(prompt.ids)
        if images != self._held_images:
            self.forget_cache()
        self._crop(prompt.ids)
        if prompt.media and not self._holds_images(prompt):
            self.forget_cache()
        return Turn(text, prompt.ids, messages, ids, images, {} if self.cached else prompt.media)

    def _holds_images(self, prompt: ImagePrompt) -> bool:
        """Whether the cache has all placeholders of images, so that text alone is left to feed."""
        if MIXING.intersection(prompt.media):
            return False
        placeholders = placeholder_ids(self._loaded.model)
        places = [place for place, token in enumerate(prompt.ids) if token in placeholders]
        return bool(places) and places[-1] < self.cached

    def _seen(self, turns: list[Message], images: Mapping[int, list[Any]]) -> ImagePrompt:
        """The prompt of turns with which images were shown, by their numbers."""
        said: list[Mapping[str, Any]] = [
            {**turn, "content": content(turn["content"], images[number])} if number in images else turn
            for number, turn in enumerate(turns)
        ]
        return encode(self._loaded, [*self._system(), *said], self._arguments)

    def _system(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _check_system(self, system: str) -> None:
        """Raise `InputError` unless the model gets to see this system prompt."""
        if not self.templated:
            raise InputError("this model has no chat template, so a system prompt has no place: say it as a turn")
        probe = [{"role": "user", "content": "?"}]
        if self._templated([{"role": "system", "content": system}, *probe]) == self._templated(probe):
            raise InputError("the model's chat template leaves system prompts out: say it as a turn")

    def _check_length(self, ids: list[int], what: str, remedy: str) -> None:
        context = self._loaded.context
        if context and len(ids) >= context:
            raise InputError(f"{what} has {len(ids)} tokens, and the model's context holds {context}: {remedy}")

    def _templated(self, messages: list[Message], *, answer: bool = True) -> list[int]:
        try:
            ids: list[int] = self._loaded.tokenizer.apply_chat_template(
                messages, **{"add_generation_prompt": answer, **self._arguments}, tokenize=True, return_dict=False
            )
        except Exception as problem:
            system = any(message["role"] == "system" for message in messages)
            remedy = "try /reset, or /system without a text" if system else "try /reset"
            raise InputError(f"the model's chat template refuses this ({one_line(problem)}): {remedy}") from problem
        return ids

    def _encoded(self, system: str | None, turns: list[Message]) -> list[int]:
        """Ids of turns that were not said here."""
        if not turns:
            return []
        if self.templated:
            own = [] if system is None else [{"role": "system", "content": system}]
            return self._templated([*own, *turns], answer=False)
        ids: list[int] = self._loaded.tokenizer("".join(turn["content"] for turn in turns))["input_ids"]
        return ids

    def _continued(self, ids: list[int], text: str) -> list[int]:
        tokenizer = self._loaded.tokenizer
        if not ids:
            first: list[int] = tokenizer(text)["input_ids"]
            return first
        before = ids[:-1] if ids[-1] in stop_ids(self._loaded.model) else ids
        return [*before, *tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _crop(self, ids: list[int]) -> None:
        """Leave in the cache what `ids` begins with, but for the last token: one must be left to feed."""
        if self.cache is None:
            return
        pairs = enumerate(zip(self._held, ids, strict=False))
        shared = next((i for i, (old, new) in pairs if old != new), min(len(self._held), len(ids)))
        # A plain decoder that was stopped may have cached a token never shown: it lies after `_held`, and goes.
        keep = min(shared, len(ids) - 1)
        if self.cached > keep:
            self.cache.crop(keep - self.cached)


def stop_ids(model: Any) -> set[int]:
    """The tokens that end an answer, as the model's generation_config names them."""
    eos = model.generation_config.eos_token_id
    return set(eos if isinstance(eos, list) else [] if eos is None else [eos])

"""Turns of an item as model inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from lade.errors import InputError
from lade.model.config import LEARNED_POSITIONS
from lade_lab.workloads import Item

BETWEEN_TURNS = "\n\n"


class Prompts:
    """Makes prompts for one model.

    Args:
        tokenizer: of the model. Its chat template, if it has one, is used for items that are chats.
        model: says how long a text may be.
    """

    def __init__(self, tokenizer: Any, model: PreTrainedModel) -> None:
        self._tokenizer = tokenizer
        config = model.config.get_text_config(decoder=True)
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self._ends = config.model_type in LEARNED_POSITIONS
        embeddings: Any = model.get_input_embeddings()
        self._vocabulary: int = embeddings.weight.shape[0]
        self._templated = bool(getattr(tokenizer, "chat_template", None))

    def ids(self, item: Item, answers: Sequence[Sequence[int]] = ()) -> list[int]:
        """Ids of an item's next turn.

        Args:
            item: the prompt, or conversation.
            answers: new tokens of the turns before.

        Raises:
            InputError: there are none, the chat template refuses them, or the model cannot continue them.
        """
        template = self._templated and item.chat
        turns = item.worded(template)[: len(answers) + 1]
        replies = [self._tokenizer.decode(list(answer), skip_special_tokens=True) for answer in answers]
        ids = self._chat(item, turns, replies) if template else self._text(turns, replies)
        self._check(item, ids)
        return ids

    def check_room(self, items: Sequence[Item], max_new_tokens: int) -> int:
        """Return the number of items that may outgrow the model's context.

        Raises:
            InputError: one of them does, and the model has no positions beyond.
        """
        count = 0
        for item in items:
            length = len(self.ids(item)) + len(item.turns) * max_new_tokens
            length += sum(len(self._tokenizer(turn)["input_ids"]) for turn in item.turns[1:])
            if self.context is not None and length > self.context:
                count += 1
                if self._ends:
                    raise InputError(
                        f"prompt {item.id!r} and its answers may have {length} tokens, but the model has positions for "
                        f"{self.context}: give fewer --max-new-tokens, or a workload of shorter prompts"
                    )
        return count

    def _chat(self, item: Item, turns: Sequence[str], replies: Sequence[str]) -> list[int]:
        messages = [{"role": "user", "content": turns[0]}]
        for reply, turn in zip(replies, turns[1:], strict=True):
            messages += [{"role": "assistant", "content": reply.strip()}, {"role": "user", "content": turn}]
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as problem:
            raise InputError(
                f"the model's chat template refuses prompt {item.id!r} ({problem}): leave it out of the workload"
            ) from problem
        return ids

    def _text(self, turns: Sequence[str], replies: Sequence[str]) -> list[int]:
        text = turns[0]
        for reply, turn in zip(replies, turns[1:], strict=True):
            text += reply + BETWEEN_TURNS + turn
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def _check(self, item: Item, ids: Sequence[int]) -> None:
        if not ids:
            raise InputError(f"prompt {item.id!r} has no tokens: leave it out of the workload")
        if max(ids) >= self._vocabulary:
            raise InputError(
                f"the tokenizer yields the id {max(ids)} for prompt {item.id!r}, but the model has a vocabulary of "
                f"{self._vocabulary}: give the tokenizer that the model was trained with"
            )
        if self.context is not None and len(ids) >= self.context:
            raise InputError(
                f"prompt {item.id!r} has {len(ids)} tokens, but the model's context holds {self.context}: "
                "leave it out of the workload, or begin with fewer with --limit"
            )

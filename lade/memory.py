"""`lade.Memory`: the adaptive method's memory, kept across generations and in files."""

from __future__ import annotations

import os
from typing import Any, Self

from lade import memory_file
from lade.decoding.drafting.memory import DEFAULT_BYTES, ContextMemory


class Memory(ContextMemory):
    """What follows the contexts seen; the least recently used are evicted first.

    By default each generation has a memory of its own. Pass one to keep it across generations:

    >>> memory = lade.Memory()
    >>> config = lade.LookaheadConfig(memory=memory)
    >>> lade.generate(model, input_ids=ids, lookahead=config)

    Similar texts are then written faster. What made one user's text fast, another user's clock could notice: share a
    memory only between users who may know of each other's texts. Threads may share one.

    Args:
        max_bytes: what it may take at most. A context takes about 50 bytes.

    Attributes:
        fingerprint: of the tokenizer that it was loaded or saved with, None if there was none.

    Raises:
        ConfigError: `max_bytes` is no whole number, or too small.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        super().__init__(max_bytes)
        self.fingerprint: str | None = None

    def save(self, path: str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Save it to a file, which holds all of it or is left as it was. Other threads may learn meanwhile.

        >>> memory.save("stories.memory", tokenizer)
        >>> memory = lade.Memory.load("stories.memory", tokenizer)

        Args:
            path: the file.
            tokenizer: the tokenizer of the model that filled it; the file is tied to its vocabulary. None: to the
                tokenizer that the memory was loaded or saved with before, if any.

        Raises:
            InputError: it cannot be written, or the memory is of another tokenizer.
        """
        fingerprint = memory_file.agreed(path, self.fingerprint, tokenizer)
        memory_file.write(path, self.snapshot(), fingerprint)
        self.fingerprint = fingerprint

    @classmethod
    def load(cls, path: str | os.PathLike[str], tokenizer: Any = None, *, max_bytes: int | None = None) -> Self:
        """A memory from a file.

        Args:
            path: the file.
            tokenizer: the tokenizer of the model that is to use it. None: it is not checked whether the file is of the
                same one.
            max_bytes: see `Memory`; None: as it was saved. If it is less, longer contexts go before shorter ones,
                among those used lately and among the others.

        Raises:
            InputError: the file cannot be read, is damaged, or is of another tokenizer.
            ConfigError: `max_bytes` is no whole number, or too small.
        """
        snapshot, fingerprint = memory_file.read(path, tokenizer)
        memory = cls.of(snapshot, max_bytes)
        memory.fingerprint = fingerprint
        return memory

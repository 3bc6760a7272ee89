"""The processor of a checkpoint, which makes tensors of images."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from transformers import AutoProcessor, PreTrainedTokenizerBase

from lade.cli.loading.hub import Source
from lade.cli.options.model import Loading
from lade.cli.terminal import one_line
from lade.errors import InputError


def load_processor(source: Source, loading: Loading) -> Any:
    """Load it.

    Raises:
        InputError: Pillow is missing, or the checkpoint has none that can be loaded.
    """
    if find_spec("PIL") is None:
        raise InputError("images cannot be read without Pillow: run  pip install pillow")
    try:
        processor = AutoProcessor.from_pretrained(
            source.name, local_files_only=source.local, trust_remote_code=loading.trust_remote_code, **loading.hub
        )
    except Exception as problem:
        missing = "torchvision" in str(problem) and find_spec("torchvision") is None
        remedy = "run  pip install torchvision" if missing else "give a checkpoint with its preprocessor_config.json"
        reason = one_line(str(problem).strip().split("\n", 1)[0], 200)
        raise InputError(f"model {source.shown!r}: its processor cannot be loaded ({reason}): {remedy}") from problem
    if isinstance(processor, PreTrainedTokenizerBase):
        raise InputError(f"model {source.shown!r} has no processor, so it takes no images: leave them out")
    if not getattr(processor, "chat_template", None):
        raise InputError(f"the processor of {source.shown!r} has no chat template, so images have no place in a prompt")
    return processor

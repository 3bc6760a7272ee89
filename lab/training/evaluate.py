"""Bits per byte of a model on text it has not read: `python -m training.evaluate FOLDER`.

A text is encoded without special tokens and cut into windows of the context's length, each begun with BOS, so
that every token is predicted once. Bits per byte do not depend on the tokenizer, and lower is better: a good
compressor of its own text kind reaches about 2 (gzip), this model about 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from lade.errors import InputError
from training.corpus import Document, held_out_documents, standard_library, training_documents

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(help="Folder of an exported model.")],
    root: Annotated[Path | None, typer.Option(help="Source tree [standard library].")] = None,
    sample_every: Annotated[int, typer.Option(help="Take every n-th training document for the mix.", min=1)] = 100,
) -> None:
    """Print bits per byte on the held-out modules, on their tests, and on a sample of the training mix."""
    root = root or standard_library()
    try:
        model, tokenizer = load(folder)
        mix = training_documents(root)[::sample_every]
    except InputError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    held_out = held_out_documents(root)
    parts = {
        **{document.name: [document] for document in held_out},
        "all held-out modules": held_out,
        "their tests": held_out_documents(root, tests=True),
        f"training mix, one document in {sample_every}": mix,
    }
    for name, documents in parts.items():
        Console().print(f"{bits_per_byte(model, tokenizer, documents):.3f}  {name}", highlight=False)


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return model (float32) and tokenizer of `folder`.

    Raises InputError if there is no such model.
    """
    if not (folder / "config.json").is_file():
        raise InputError(f"model folder {folder}: no config.json in it; name a folder that training exported")
    model: PreTrainedModel = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model, PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def bits_per_byte(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, documents: Iterable[Document]) -> float:
    """Return the mean code length of `documents` under `model`, in bits per UTF-8 byte.

    A document counts as often as training repeats it.
    """
    nats, size = 0.0, 0
    for document in documents:
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        nats += document.repeats * _nats(model, ids)
        size += document.repeats * len(document.text.encode("utf-8"))
    return nats / math.log(2) / size


@torch.inference_mode()
def _nats(model: PreTrainedModel, ids: list[int]) -> float:
    """Return the negative log-likelihood of `ids`, window by window."""
    context = model.config.max_position_embeddings
    nats = 0.0
    for start in range(0, len(ids), context):
        window = torch.tensor([[model.config.bos_token_id, *ids[start : start + context]]])  # [1, T + 1]
        logits = model(window[:, :-1]).logits[0]  # [T, V]
        nats += functional.cross_entropy(logits.float(), window[0, 1:], reduction="sum").item()
    return nats


if __name__ == "__main__":
    app()

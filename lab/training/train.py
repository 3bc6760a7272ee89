"""Train the embedded model: `python -m training.train --help`.

The work folder holds the tokenizer, the encoded corpus and the checkpoint. The command begins there or goes on
there, and at the end writes the model to the export folder. It may be killed at any moment.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerFast

from lade.errors import InputError
from training.corpus import question_documents, standard_library, training_documents
from training.export import export
from training.plan import Shape, TrainPlan
from training.tokens import EncodedCorpus, encode_corpus, train_tokenizer
from training.trainer import Trainer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    work: Annotated[Path, typer.Option(help="Folder for tokenizer, corpus and checkpoint; resumed if not empty.")],
    out: Annotated[Path, typer.Option(help="Folder to write the trained model to.")],
    root: Annotated[Path | None, typer.Option(help="Source tree to learn from [standard library].")] = None,
    questions: Annotated[list[Path] | None, typer.Option(help="JSONL with question/answer; repeatable.")] = None,
    tokens: Annotated[int, typer.Option(help="Training tokens in all.")] = TrainPlan.total_tokens,
    seed: Annotated[int, typer.Option(help="Seed of weights and data order.")] = TrainPlan.seed,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 2,
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.", min=1)] = 45.0,
    fast: Annotated[bool, typer.Option(help="Compiled, bf16 autocast; otherwise eager float32.")] = True,
) -> None:
    """Train a small Llama on the Python standard library and write it as a Hugging Face folder."""
    console = Console()
    try:
        torch.set_num_threads(threads)
        shape, plan = Shape(), TrainPlan(total_tokens=tokens, seed=seed)
        tokenizer, corpus = prepare(work, root or standard_library(), questions or [], shape)
        trainer = Trainer(corpus, plan, shape, fast=fast)
        train(trainer, work / "checkpoint.pt", save_every, console)
        size = export(trainer.model, tokenizer, out)
    except InputError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    console.print(f"{out}: {size / 1e6:.1f} MB after {trainer.progress.seconds / 60:.0f} minutes of training")


def prepare(
    work: Path, root: Path, questions: list[Path], shape: Shape
) -> tuple[PreTrainedTokenizerFast, EncodedCorpus]:
    """Return the tokenizer and the encoded corpus of `work`, made on the first call and loaded later.

    Raises InputError if `work` holds a corpus of other sources.
    """
    sources = tuple(str(path.resolve()) for path in [root, *questions])
    corpus_path, tokenizer_path = work / "corpus.npz", work / "tokenizer"
    if corpus_path.exists():
        corpus = EncodedCorpus.load(corpus_path)
        if corpus.sources != sources:
            raise InputError(f"sources {sources}: {work} was begun with {corpus.sources}; use a fresh work folder")
        return PreTrainedTokenizerFast.from_pretrained(tokenizer_path), corpus
    documents = training_documents(root) + [d for path in questions for d in question_documents(path)]
    tokenizer = train_tokenizer((d.text for d in documents), shape.vocab_tokens, shape.context_tokens)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(tokenizer_path)
    corpus = encode_corpus(tokenizer, documents, sources)
    corpus.save(corpus_path)
    return tokenizer, corpus


def train(trainer: Trainer, checkpoint: Path, save_every_s: float, console: Console) -> None:
    """Step `trainer` to its plan's end, resuming from `checkpoint` if it is there and saving to it on the way."""
    if checkpoint.exists():
        trainer.resume(checkpoint)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=console.is_terminal) as bar:
        task = bar.add_task("", total=trainer.plan.total_tokens, completed=trainer.progress.tokens)
        saved = lapped = time.monotonic()
        begun, losses = trainer.progress.tokens, list[float]()
        while not trainer.done:
            losses = [*losses[-99:], trainer.step().item()]
            now = time.monotonic()
            trainer.progress.seconds += now - lapped
            lapped = now
            text = f"loss {sum(losses) / len(losses):.3f}"
            bar.update(task, completed=trainer.progress.tokens, description=text)
            if now - saved >= save_every_s:
                trainer.save(checkpoint)
                if not console.is_terminal:
                    rate = (trainer.progress.tokens - begun) / (now - saved)
                    console.print(f"{trainer.progress.tokens:,} tokens  {text}  {rate:,.0f} tokens/s")
                saved, begun = now, trainer.progress.tokens
    trainer.save(checkpoint)


if __name__ == "__main__":
    app()

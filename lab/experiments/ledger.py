"""Exactness ledger: tokens compared with plain `model.generate` on every path, and how many differed.

    python lab/experiments/ledger.py --out FILE.jsonl [--pieces 10000] [--seconds S]
    python lab/experiments/ledger.py --out FILE.jsonl --model FILE.gguf --prompts question.jsonl --seconds 900
    torchrun --nproc-per-node 2 lab/experiments/ledger.py --out FILE.jsonl --paths "several processes" --pieces 100

Each piece is a path, a model and a seed, which draws prompt, sizes and arguments. It is appended to --out when it is
compared, and the next run goes on behind it, so that any number of tokens is a matter of time; the table is made of the
whole file. Toys are random models of a few thousand parameters, whose texts hardly repeat; the embedded model is
trained and has an MTP layer. Models in bfloat16 are invariant (`lade.invariant`), and compared with `model.generate`
of the same invariant model. With --model it is other models that are compared, on the prompts of a file.

The next piece is of the path with the fewest tokens, where batches may have SHARE times as many, and of the model that
this path has spent the least time on.
"""

from __future__ import annotations

import json
import os
import random
import string
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
import typer

import lade
from lade.embedded import model_path
from lade.server.served_model import ServedModel
from lade.server.settings import Settings
from lade.testing import toy_model
from lade_lab.replay import read_model, table
from lade_lab.served import ask, ask_streamed, server
from lade_lab.workloads import Item, load

TOKENS = 128
"""New tokens of a text."""
ROWS, BATCH, WIDE = 4, 16, 128
"""Rows of engines and servers, of batches of beams, grammars and MTP layers, and of plain batches at most."""
SHARE = {"batch": 22, "batch, sampled": 22}
"""How many tokens a path has for one of the others."""
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "n": {"type": "integer"},
          "ok": {"enum": ["yes", "no", "perhaps"]}}, "required": ["name", "n", "ok"]}  # fmt: skip
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
Pairs = list[tuple[list[int], list[int]]]
"""New tokens of plain decoding, and of a path."""


@dataclass
class Subject:
    """A model whose decoding is compared.

    Attributes:
        name: name in the table.
        dtype: dtype of its weights.
        model: the model.
        tokenizer: its tokenizer; None for toys.
        stack: closed at the end of the run.
        questions: ids that prompts are taken from; random ones if there are none.
    """

    name: str
    dtype: str
    model: Any
    tokenizer: Any
    stack: ExitStack
    questions: Sequence[list[int]] = field(default=())

    @cached_property
    def url(self) -> str:
        """URL of a server of this model, which is started at the first use."""
        served = ServedModel(self.model, self.tokenizer, context=self.model.config.max_position_embeddings)
        return self.stack.enter_context(server(served, Settings(max_rows=ROWS, prefix_cache=2**27)))

    @cached_property
    def engine(self) -> lade.Engine:
        """An engine of this model."""
        return self.stack.enter_context(lade.Engine(self.model, max_rows=ROWS, prefix_cache=2**26))

    @cached_property
    def shared(self) -> Any:
        """The model again, decoded by all processes of the job."""
        return lade.parallel(reloaded(self))

    def prompt(self, rng: random.Random) -> list[int]:
        """Return one of the questions, or a random prompt of which some tokens recur."""
        if self.questions:
            return list(rng.choice(self.questions))
        vocabulary = self.model.config.vocab_size
        some = [rng.randrange(3, vocabulary) for _ in range(rng.randrange(4, 40))]
        return [*some, *some[: rng.randrange(len(some))]]


def reloaded(subject: Subject) -> Any:
    """Return another copy of a subject's model."""
    copy = type(subject.model)(subject.model.config).to(subject.model.dtype)
    copy.load_state_dict(subject.model.state_dict())
    for name, buffer in subject.model.named_buffers():  # a cast rounds those that a checkpoint keeps in float32
        module, _, own = name.rpartition(".")
        setattr(copy.get_submodule(module), own, buffer.clone())
    copy.generation_config = subject.model.generation_config
    return promised(copy.eval())


def method(rng: random.Random) -> lade.LookaheadConfig:
    """Return a random method: adaptive at a fixed size, or the paper's."""
    if rng.random() < 0.3:
        return lade.LookaheadConfig(rng.randrange(2, 10), rng.randrange(2, 6), rng.randrange(1, 8))
    return lade.LookaheadConfig(budget=rng.choice([2, 4, 8, 16, 32, 64]))


def sampling(rng: random.Random) -> dict[str, Any]:
    """Return random arguments of sampling."""
    top = {"temperature": rng.choice([0.5, 0.7, 1.0, 1.3]), "top_k": rng.choice([0, 5, 50])}
    return {"do_sample": True, **top, "top_p": rng.choice([0.8, 0.95, 1.0])}


def rows_of(output: torch.Tensor, width: int) -> list[list[int]]:
    """Return the new tokens of each row."""
    rows: list[list[int]] = output[:, width:].tolist()
    return rows


def generated(
    subject: Subject,
    rng: random.Random,
    rows: int,
    own: dict[str, Any],
    reference: Mapping[str, Any] = MappingProxyType({}),
    **arguments: Any,
) -> Pairs:
    """Compare `lade.generate` with `model.generate`, and the state of torch's generator afterwards.

    Args:
        subject: the model.
        rng: draws the prompts and the seed.
        rows: B, the number of texts.
        own: arguments of `lade.generate` alone.
        reference: arguments of `model.generate` alone.
        **arguments: arguments of both.
    """
    model = subject.shared if own.pop("shared", False) else subject.model
    prompts = [subject.prompt(rng) for _ in range(rows)]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    arguments = {"attention_mask": mask, "max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, **arguments}
    seed = rng.randrange(2**31)
    torch.manual_seed(seed)
    plain, state = subject.model.generate(ids, **reference, **arguments), torch.get_rng_state()
    torch.manual_seed(seed)
    if "prediction" in own:
        own = {**own, "prediction": edited(rows_of(plain, width)[0], subject, rng)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", lade.FallbackWarning)
        warnings.simplefilter("error", lade.PrecisionWarning)  # nothing is promised of such a model
        found = lade.generate(model, ids, **own, **arguments)
    assert torch.equal(torch.get_rng_state(), state), "torch's generator is elsewhere"
    eos = subject.model.generation_config.eos_token_id
    own_rows = [until(row, eos) for row in rows_of(found, width)]
    return list(zip([until(row, eos) for row in rows_of(plain, width)], own_rows, strict=True))


def until(row: list[int], eos: int | None) -> list[int]:
    """Return a row of a batch up to its end, without padding."""
    return row[: row.index(eos) + 1] if eos in row else row


def edited(answer: Sequence[int], subject: Subject, rng: random.Random) -> list[int]:
    """Return a text with some tokens replaced."""
    return [rng.randrange(subject.model.config.vocab_size) if rng.random() < 0.1 else token for token in answer]


def streamed(subject: Subject, rng: random.Random) -> Pairs:
    """Compare the joined steps of `lade.stream`."""
    ids = torch.tensor([subject.prompt(rng)])
    arguments = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
    }
    plain = subject.model.generate(ids, **arguments)[0, ids.shape[1] :].tolist()
    steps = lade.stream(subject.model, ids, lookahead=method(rng), **arguments)
    return [(plain, [token for step in steps for token in step.tokens])]


def by_engine(subject: Subject, rng: random.Random) -> Pairs:
    """Compare requests that an engine decodes together, greedy and sampled, with each alone."""
    made, pairs = [], Pairs()
    for number in range(2 * ROWS):
        prompt, seed = subject.prompt(rng), rng.randrange(2**31)
        arguments = {"max_new_tokens": TOKENS, "do_sample": False, **(sampling(rng) if number % 2 else {})}
        handle = subject.engine.add(prompt, lookahead=method(rng), seed=seed, **arguments)
        made.append((prompt, seed, arguments, handle))
    for prompt, seed, arguments, handle in made:
        torch.manual_seed(seed)
        ids = torch.tensor([prompt])
        plain = subject.model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **arguments)
        pairs.append((rows_of(plain, len(prompt))[0], handle.result()[0, len(prompt) :].tolist()))
    return pairs


def by_server(subject: Subject, rng: random.Random) -> Pairs:
    """Compare `/v1/completions`, streamed and whole, greedy and sampled."""
    pairs = Pairs()
    for number in range(ROWS):
        text = "".join(rng.choices(string.ascii_lowercase + "  \n():=", k=rng.randrange(20, 80)))
        seed, temperature = rng.randrange(2**31), 0.8 if number % 2 else 0.0
        body = {"prompt": text, "seed": seed, "temperature": temperature, "max_tokens": TOKENS}
        budget = rng.choice([4, 16, 32])
        reply = (ask_streamed if number > 1 else ask)(
            f"{subject.url}/v1/completions", {**body, "lookahead": {"budget": budget}}
        )
        assert not reply.error, reply.error
        ids = torch.tensor([subject.tokenizer(text)["input_ids"]])
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        torch.manual_seed(seed)
        plain = subject.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, **drawn)
        pairs.append((rows_of(plain, ids.shape[1])[0], reply.tokens))
    return pairs


def by_grammar(subject: Subject, rng: random.Random) -> Pairs:
    """Compare a batch of answers that follow a JSON schema with those of `Grammar.processor`."""
    grammar, tokenizer = lade.Grammar.json_schema(SCHEMA), subject.tokenizer
    own = {"grammar": grammar, "tokenizer": tokenizer, "lookahead": lade.LookaheadConfig(budget=16)}
    plain = {"logits_processor": [grammar.processor(tokenizer)]}
    drawn = sampling(rng) if rng.random() < 0.5 else {}
    return generated(subject, rng, rng.choice([1, BATCH]), own, plain, **drawn)


def by_layer(subject: Subject, rng: random.Random) -> Pairs:
    """Compare one text or a batch, greedy or sampled, whose drafts an MTP layer made, too."""
    own = {"lookahead": lade.LookaheadConfig(budget=rng.choice([4, 8, 16]), mtp=True)}
    drawn = sampling(rng) if rng.random() < 0.5 else {}
    return generated(subject, rng, rng.choice([1, BATCH]), own, **drawn)


def by_beams(subject: Subject, rng: random.Random) -> Pairs:
    """Compare one text or a batch of beam search, or of beam sampling."""
    drawn = sampling(rng) if rng.random() < 0.3 else {}
    return generated(
        subject,
        rng,
        rng.choice([1, BATCH // 2]),
        {"lookahead": lade.LookaheadConfig()},
        num_beams=rng.randrange(2, 5),
        **drawn,
    )


PATHS: dict[str, Callable[[Subject, random.Random], Pairs]] = {
    "greedy": lambda subject, rng: generated(subject, rng, 1, {"lookahead": method(rng)}),
    "greedy, sizes chosen": lambda subject, rng: generated(subject, rng, 1, {}),
    "sampled": lambda subject, rng: generated(subject, rng, 1, {"lookahead": method(rng)}, **sampling(rng)),
    "beams": by_beams,
    "batch": lambda s, rng: generated(s, rng, rng.choice([4, 64, WIDE]), {"lookahead": method(rng)}),
    "batch, sampled": lambda s, rng: generated(
        s, rng, rng.choice([4, 64, WIDE]), {"lookahead": method(rng)}, **sampling(rng)
    ),
    "prediction": lambda s, rng: generated(s, rng, 1, {"prediction": None, "lookahead": method(rng)}),
    "stream": streamed,
    "engine": by_engine,
    "server": by_server,
    "grammar": by_grammar,
    "MTP": by_layer,
    "several processes": lambda s, rng: generated(
        s, rng, rng.choice([1, BATCH]), {"shared": True, "lookahead": method(rng)}
    ),
}


def applies(path: str, subject: Subject) -> bool:
    """Return whether a path can be compared on a model."""
    if path == "several processes":
        return "WORLD_SIZE" in os.environ
    if path == "MTP":
        return bool(lade.supports(subject.model).mtp)
    return path not in ("server", "grammar") or subject.tokenizer is not None


def subjects(paths: Sequence[str], prompts: Path | None, stack: ExitStack) -> Iterator[Subject]:
    """Yield the models given, which answer `prompts`; without any, toys and the embedded model.

    Those in bfloat16 are invariant.
    """
    for path in paths:
        model, tokenizer = read_model(path)
        dtype = str(model.dtype).removeprefix("torch.")
        questions = [] if prompts is None else [item_ids(tokenizer, item) for item in load(prompts).items]
        yield Subject(Path(path).stem, dtype, model, tokenizer, stack, questions)
    if paths:
        return
    for family, dtype in (("llama", "float64"), ("qwen3", "float32"), ("gpt2", "float64"), ("llama", "bfloat16")):
        yield Subject(f"toy {family}", dtype, promised(toy_model(family, dtype=DTYPES[dtype])), None, stack)
    for dtype in ("float32", "bfloat16"):
        model, tokenizer = read_model(str(model_path()), DTYPES[dtype])
        yield Subject("embedded", dtype, promised(model), tokenizer, stack)


def item_ids(tokenizer: Any, item: Item) -> list[int]:
    """Return the ids of a prompt's first turn, by the tokenizer's chat template if it has one."""
    (text, *_), templated = item.worded(tokenizer.chat_template is not None), item.chat and tokenizer.chat_template
    if not templated:
        return list(tokenizer(text)["input_ids"])
    message = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))


def promised(model: Any) -> Any:
    """Return a model whose texts are promised: in 16 bits, an invariant one."""
    return lade.invariant(model) if model.dtype == torch.bfloat16 else model


def differing(pairs: Pairs) -> int:
    """Return the number of tokens from the first difference on, over all texts."""
    total = 0
    for plain, own in pairs:
        same = next((at for at, both in enumerate(zip(plain, own, strict=False)) if both[0] != both[1]), None)
        same = min(len(plain), len(own)) if same is None else same
        total += max(len(plain), len(own)) - same
    return total


def records(path: Path) -> list[dict[str, Any]]:
    """Return the pieces of a ledger; none if there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(pieces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the table: by path, the sum, and what it was compared on."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for piece in pieces:
        groups[piece["path"]].append(piece)
    rows = [
        {
            "path": path,
            "models": ", ".join(sorted({f"{piece['model']} {piece['dtype']}" for piece in group})),
            "texts": sum(piece["texts"] for piece in group),
            "tokens": sum(piece["tokens"] for piece in group),
            "different": sum(piece["different"] for piece in group),
        }
        for path, group in ((path, groups[path]) for path in PATHS if path in groups)
    ]
    sums = {name: sum(row[name] for row in rows) for name in ("texts", "tokens", "different")}
    return [*rows, {"path": "all", "models": "", **sums}]


def run(
    out: Path,
    wanted: Sequence[str],
    models: Sequence[str] = (),
    prompts: Path | None = None,
    *,
    pieces: int = 10_000,
    until: float = float("inf"),
) -> None:
    """Compare piece by piece, next what is behind, until there are enough pieces or the time is over.

    Args:
        out: the ledger, which is continued.
        wanted: names of paths.
        models: folders or GGUF files; none for toys and the embedded model.
        prompts: a file of prompts for `models`; see `lade_lab.workloads`.
        pieces: how many to compare.
        until: when to begin no further one, by `time.monotonic`.
    """
    leads, known = os.environ.get("RANK", "0") == "0", records(out)
    with ExitStack() as stack:
        found = list(subjects(models, prompts, stack))
        paths = [path for path in wanted if any(applies(path, each) for each in found)]
        while paths and pieces and time.monotonic() < until:
            path, subject, seed = behind(known, paths, found)
            began = time.perf_counter()
            pairs = PATHS[path](subject, random.Random(f"{path} {subject.name} {seed}"))
            pieces -= 1
            piece = {"path": path, "model": subject.name, "dtype": subject.dtype, "seed": seed, "texts": len(pairs)}
            piece |= {"tokens": sum(len(plain) for plain, _ in pairs), "different": differing(pairs)}
            piece["seconds"] = round(time.perf_counter() - began, 3) if leads and "WORLD_SIZE" not in os.environ else 0
            known.append(piece)
            if leads:
                with out.open("a") as file:
                    file.write(json.dumps(piece) + "\n")


def behind(
    known: Sequence[dict[str, Any]], paths: Sequence[str], models: Sequence[Subject]
) -> tuple[str, Subject, int]:
    """Return path, model and seed of the next piece, from the pieces there are."""
    tokens = {path: sum(each["tokens"] for each in known if each["path"] == path) for path in paths}
    path = min(paths, key=lambda path: tokens[path] / SHARE.get(path, 1))
    ranks = []
    for number, subject in enumerate(models):
        own = [k for k in known if (k["path"], k["model"], k["dtype"]) == (path, subject.name, subject.dtype)]
        if applies(path, subject):
            ranks.append((sum(k.get("seconds", 0) for k in own), len(own), number))
    _, seed, number = min(ranks)
    return path, models[number], seed


def main(
    out: Annotated[Path, typer.Option(help="the ledger; a run goes on behind its end")],
    paths: Annotated[str, typer.Option(help="names of paths, separated by semicolons")] = ";".join(PATHS),
    model: Annotated[list[str] | None, typer.Option(help="folder or GGUF file in place of toys; repeatable")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines that these models answer")] = None,
    pieces: Annotated[int, typer.Option(help="texts or groups of texts to compare in this run")] = 10_000,
    seconds: Annotated[float, typer.Option(help="time after which no piece is begun; for one process only")] = 1e9,
) -> None:
    run(out, paths.split(";"), model or [], prompts, pieces=pieces, until=time.monotonic() + seconds)
    if os.environ.get("RANK", "0") == "0":
        print(table(["path", "models", "texts", "tokens", "different"], summary(records(out))))


if __name__ == "__main__":
    typer.run(main)

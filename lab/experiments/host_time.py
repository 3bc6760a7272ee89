"""Where the time of a step goes: a profiler of what the host does, in the library and in a model's pass.

    python lab/experiments/host_time.py step --model FOLDER [--method 7,5,7 | --method budget=16 | ...] [--no-parts]
    python lab/experiments/host_time.py pass --model FOLDER --inflate 500e6 [--weights int8 | dense] [--invariant]
    python lab/experiments/host_time.py call --model FOLDER [--prompt-tokens 20 --prompt-tokens 300]
    python lab/experiments/host_time.py replay --model FOLDER --prompts FILE.jsonl [--budget 64] [--pass-ms 5]
    python lab/experiments/host_time.py controller [--nodes 64] [--pass-ms 5]
    python lab/experiments/host_time.py engine [--requests 64 --requests 256] [--pass-ms 5]

"step" times all but the model's forward pass, by part. Each part is timed by wrapping its function, which counts as the
library's time, so this shows shares; with `--no-parts` the total is right.

"pass" times a CPU pass over 1, 8 and 16 tokens by the class of its modules, attention and the cache; the rest is what
modelling code does between them (rotary positions, residuals, reshapes) and Python.

"call" takes the CPU time of whole calls of few tokens, `model.generate`'s beside ours, in turn.

"replay" tells, without a GPU, how long one would wait. A forward pass on a CPU leaves nothing in the CPU's caches of
what the library needs next; one on a GPU does. So the passes are made once, and what was read of their logits is
written down. Then the same texts are written again from that, without a model: growing the trees, filling a captured
pass's inputs, walking, and learning are all that is left. The tokens must come out the same.

"controller" times the decision about a lone row's tree, which "replay" leaves out: its trees are of one size.

"engine" times what an engine waits for, `propose` and `learn_batch` of many requests, chains whose tokens are
accepted. Texts are made up: each token decides the next one, and two tokens what else is likely.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median, quantiles
from time import perf_counter, process_time, sleep, thread_time
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lade
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cuda_graphs.pass_inputs import StaticInputs
from lade.decoding import loop
from lade.decoding.drafting.adaptive import AdaptiveDrafter
from lade.decoding.drafting.controller import Controller
from lade.decoding.drafting.copy_drafting import OwnText
from lade.decoding.drafting.step_cost import StepCost
from lade.decoding.kernels.layout import BITS, WIDTH, Ints
from lade.decoding.kernels.tables import tails_of
from lade.decoding.loop import DecodeLoop
from lade.decoding.readout import Readout
from lade.decoding.row import Row, RowStep
from lade.decoding.verify import Greedy, walk
from lade.engines import drafter as engine_drafter
from lade.model.facts import CACHE
from lade.model.inputs import MaskPlan, StepInputs
from lade.model.kv_cache import TreeCache
from lade.model.prepared import special_ids, vocabulary_of
from lade_lab.harness.arms import PLAIN
from lade_lab.inflation import inflate

app = typer.Typer(add_completion=False)
Folder = Annotated[Path, typer.Option("--model", help="folder of a causal language model")]
SIZES = (1, 8, 16)
PARTS: list[tuple[Any, str, str]] = [
    (DecodeLoop, "_learn", "learning"),
    (StepInputs, "of", "the step's tensors"),
    (MaskPlan, "masks", "masks in the model's form"),
    (TreeCache, "keep", "moving the accepted path's keys and values"),
    (loop, "read", "argmax, likeliest tokens, and the copy to the host"),
    (DecodeLoop, "_draft", "drafting the trees"),
    (RowStep, "walk", "the walk, stop rules included"),
]


def timed(
    function: Callable[..., Any], part: str, spent: Counter[str], clock: Callable[[], float] = perf_counter
) -> Callable[..., Any]:
    """The function, with its seconds counted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        try:
            return function(*args, **kwargs)
        finally:
            spent[part] += clock() - start

    return call


def config_of(method: str) -> lade.LookaheadConfig:
    if method.startswith("budget="):
        return lade.LookaheadConfig(budget=int(method.removeprefix("budget=")))
    return PLAIN if method == "plain" else lade.LookaheadConfig(*map(int, method.split(",")))


@app.command()
def step(
    model: Folder,
    prompt: str = "Once upon a time there was a little girl named Lily",
    method: Annotated[str, typer.Option(help="W,N,G or budget=B or plain")] = "7,5,7",
    parts: Annotated[bool, typer.Option(help="time them one by one")] = True,
    rounds: int = 10,
    threads: int = 1,
) -> None:
    """The library's own time of a step by part."""
    torch.set_num_threads(threads)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    stats, spent = lade.Stats(), Counter[str]()
    arguments = {
        "input_ids": tokenizer(prompt, return_tensors="pt").input_ids,
        "max_new_tokens": 200,
        "do_sample": False,
        "eos_token_id": None,
        "lookahead": config_of(method),
        "stats": stats,
    }
    for owner, name, part in PARTS if parts else []:
        wrapper = timed(getattr(owner, name), part, spent)
        setattr(owner, name, staticmethod(wrapper) if owner is StepInputs else wrapper)
    lade.generate(loaded, **arguments)
    spent.clear()
    total, found = lade.Stats(), list[float]()
    for _ in range(rounds):
        stats.reset()
        lade.generate(loaded, **arguments)
        found.append(1e6 * stats.library_s / stats.steps)
        total.merge(stats)
    low, middle, high = quantiles(found, n=4)
    share = f"{total.library_s / total.decode_s:.1%} of it, {total.tokens_per_step:.2f} tokens a step"
    print(f"{middle:.0f} us a step ({low:.0f} to {high:.0f}), {share}")
    for part, seconds in spent.most_common():
        print(f"{seconds / total.library_s:6.1%}  {1e6 * seconds / total.steps:4.0f} us  {part}")
    if parts:
        print(f"{1 - sum(spent.values()) / total.library_s:6.1%}  the rest: calls, bookkeeping")


def watch(model: Any, cache: DynamicCache, spent: Counter[str]) -> None:
    """Time the parts of a model from now on."""
    for module in model.modules():
        if not module._modules and not isinstance(module, torch.nn.Identity):
            linear = isinstance(module, (torch.nn.Linear, PackedLinear))
            module.forward = timed(module.forward, "matrix products" if linear else type(module).__name__, spent)
    attention = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(attention, timed(ALL_ATTENTION_FUNCTIONS[attention], "attention", spent))
    cache.update = timed(cache.update, "cache", spent)  # type: ignore[method-assign]


@app.command("pass")
@torch.no_grad()
def pass_(
    model: Folder,
    params: Annotated[float | None, typer.Option("--inflate", help="parameters to grow it to")] = None,
    dtype: str = "bfloat16",
    weights: Annotated[str, typer.Option(help="packed, int8, int4 or dense")] = "packed",
    invariant: Annotated[bool, typer.Option(help="as lade.invariant makes it")] = False,
    cached: Annotated[int, typer.Option(help="tokens in the cache")] = 256,
    rounds: int = 15,
    threads: int = 1,
) -> None:
    """Time of a CPU pass by part."""
    torch.set_num_threads(threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    loaded = (inflate(loaded, params) if params else loaded).to(getattr(torch, dtype))
    if weights != "dense":
        lade.pack(loaded, weights=None if weights == "packed" else weights)
    if invariant:
        lade.invariant(loaded)
    cache, vocabulary, spent = DynamicCache(config=loaded.config), loaded.config.vocab_size, Counter[str]()
    loaded(torch.randint(vocabulary, (1, cached)), **{CACHE: cache})
    watch(loaded, cache, spent)
    found: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
    for _ in range(rounds + 1):
        for size, samples in found.items():
            spent.clear()
            start = perf_counter()
            loaded(torch.randint(vocabulary, (1, size)), **{CACHE: cache})
            whole = perf_counter() - start
            cache.crop(-size)
            samples.append({"whole": whole, "the rest": whole - sum(spent.values()), **spent})
    for size, samples in found.items():
        del samples[0]
        parts = {part: 1e3 * median(sample.get(part, 0.0) for sample in samples) for part in samples[0]}
        shown = ", ".join(f"{part} {ms:.1f}" for part, ms in sorted(parts.items(), key=lambda item: -item[1]))
        print(f"{size:2} tokens, ms: {shown}")


ARMS: dict[str, lade.LookaheadConfig | str | None] = {"generate": None, "plain": PLAIN, "adaptive": "auto"}
Call = Callable[[], object]


def call_of(model: Any, arm: str, tokens: int, new_tokens: int) -> Call:
    """A call of this arm, with the same prompt every time."""
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "eos_token_id": None}
    arguments |= {"max_new_tokens": new_tokens, "do_sample": False}
    if arm == "generate":
        return lambda: model.generate(**arguments)
    return lambda: lade.generate(model, lookahead=ARMS[arm], **arguments)  # type: ignore[arg-type]


def milliseconds(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """CPU time of each call, ascending."""
    taken: dict[str, list[float]] = {arm: [] for arm in calls}
    for _ in range(rounds):
        for arm, made in calls.items():
            start = process_time()
            made()
            taken[arm].append(1e3 * (process_time() - start))
    return {arm: sorted(each) for arm, each in taken.items()}


@app.command()
def call(
    model: Folder,
    prompt_tokens: Annotated[list[int] | None, typer.Option(help="length of the prompt; may be repeated")] = None,
    new_tokens: Annotated[list[int] | None, typer.Option(help="tokens to write; may be repeated")] = None,
    rounds: int = 200,
) -> None:
    """CPU time of whole calls of few tokens."""
    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    for tokens in prompt_tokens or [20, 300]:
        for new in new_tokens or [1, 2]:
            calls = {arm: call_of(loaded, arm, tokens, new) for arm in ARMS}
            milliseconds(calls, 3)  # measures the step cost, reads machine code
            taken = milliseconds(calls, rounds)
            least = ", ".join(f"{arm} {each[0]:.2f} ({median(each):.2f})" for arm, each in taken.items())
            print(f"{tokens} tokens, {new} new: {least} ms, least (median)", flush=True)


@dataclass
class Written:
    """A text, and what was read while it was written: of the prompt first, then of each pass."""

    prompt: list[int]
    tokens: list[int]
    said: list[Readout]


def written(model: Any, prompts: list[torch.Tensor], budget: int, new_tokens: int) -> Iterator[Written]:
    """Texts, one after the other, with one memory."""
    memory, said, read = lade.Memory(), list[Readout](), loop.read

    def listening(*args: Any, wants_entries: bool = True) -> Readout:
        said.append(read(*args, wants_entries=wants_entries))
        return said[-1]

    loop.read = listening
    try:
        for ids in prompts:
            said.clear()
            config = lade.LookaheadConfig(budget=budget, memory=memory)
            output = lade.generate(model, input_ids=ids, lookahead=config, max_new_tokens=new_tokens, do_sample=False)
            assert isinstance(output, torch.Tensor)
            yield Written(ids[0].tolist(), output[0].tolist(), [each for each in said if each.entries is not None])
    finally:
        loop.read = read


def replayed(model: Any, texts: list[Written], budget: int, pass_s: float) -> list[list[float]]:
    """Write the texts again, with a pause of `pass_s` for each pass; seconds of growing, inputs, walk and learning."""
    memory, taken = lade.Memory(), []
    for text in texts:
        excluded, vocabulary = special_ids(model.generation_config), vocabulary_of(model)
        sources = [OwnText((), excluded)]
        config = lade.LookaheadConfig(memory=memory, budget=budget)
        drafter = AdaptiveDrafter(config, None, excluded, vocabulary=vocabulary, sources=sources)
        end, first = len(text.tokens), text.said[0]
        row = Row(text.prompt, drafter, Greedy(), lambda tokens, end=end: len(tokens) >= end)  # type: ignore[misc]
        assert first.entries is not None
        drafter.learn_prompt(row.tokens, len(text.prompt) - len(first.argmax_ids), first.entries)
        row.emit(text.tokens[len(text.prompt)])
        drafter.begin(row.tokens, len(text.prompt))
        inputs = StaticInputs(1, budget, torch.device("cpu"))
        for said in text.said[1:]:
            clock = [perf_counter()]
            draft = drafter.draft(row.tokens, None)
            clock.append(perf_counter())
            inputs.fill([draft.tree], [len(row.tokens) - 1])
            clock.append(perf_counter())
            sleep(pass_s)
            back = perf_counter()
            verdict = walk(draft.tree, row.chooser.bind(torch.empty(0), said.argmax_ids, row.tokens), row.emit)
            walked = perf_counter()
            drafter.learn(row.tokens, draft, said, verdict)
            taken.append([*np.diff(clock).tolist(), walked - back, perf_counter() - walked])
        if row.tokens != text.tokens:
            raise SystemExit("the text came out otherwise: what was timed is not what happens")
    return taken


@app.command()
def replay(
    model: Folder,
    prompts: Annotated[Path, typer.Option(help='JSON lines with a "prompt" each')],
    budget: Annotated[list[int] | None, typer.Option(help="tokens of a step; may be repeated")] = None,
    limit: Annotated[int, typer.Option(help="prompts")] = 12,
    new_tokens: Annotated[int, typer.Option(help="tokens to write for each")] = 150,
    rounds: Annotated[int, typer.Option(help="times that all is written again")] = 5,
    pass_ms: Annotated[float, typer.Option(help="time to sleep in place of each pass")] = 0.0,
) -> None:
    """Host time of a step during which a GPU would wait."""
    torch.set_num_threads(1)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    lines = prompts.read_text(encoding="utf-8").splitlines()[:limit]
    ids = [tokenizer(json.loads(line)["prompt"], return_tensors="pt").input_ids for line in lines]
    for size in budget or [16, 64]:
        texts = list(written(loaded, ids, size, new_tokens))
        taken = 1e6 * np.array([each for _ in range(rounds) for each in replayed(loaded, texts, size, 1e-3 * pass_ms)])
        growing, inputs, walking, learning = np.median(taken, axis=0)
        low, middle, high = np.percentile(taken.sum(axis=1), [25, 50, 75])
        parts = f"growing {growing:.0f}, inputs {inputs:.0f}, walk {walking:.0f}, learning {learning:.0f}"
        print(f"{size} tokens: {middle:.0f} us a step ({low:.0f} to {high:.0f}); {parts}")


@app.command("controller")
def controller_(
    nodes: Annotated[int, typer.Option(help="tokens fed in most steps")] = 64,
    steps: int = 400,
    pass_ms: Annotated[float, typer.Option(help="time to sleep in place of each pass")] = 0.0,
) -> None:
    """Time of the decision about a lone row's tree, and of learning from the step."""
    knots = {1: 1.0, 8: 1.02, nodes: 1.1, 2 * nodes: 3.0}
    controller, luck = Controller(StepCost.of({size: [5e-3 * each] for size, each in knots.items()})), Random(0)
    controller.begin_texts(1)
    scores, sizes, taken = [0.9**rank for rank in range(nodes)], Counter[int](), list[list[float]]()
    for _ in range(steps):
        clock, size, accepted = [perf_counter()], 1, list[int]()
        skipping = controller.skip_drafting()
        if not skipping:
            controller.stages()
        clock.append(perf_counter())
        if not skipping:
            controller.decide([scores])
            size = controller.choose(scores)
            controller.fill_size(size)
        clock.append(perf_counter())
        sleep(1e-3 * pass_ms)
        accepted = [rank for rank in (1, 2, 4, 9) if rank < size and luck.random() < 0.8]
        back = perf_counter()
        if size > 1:
            controller.learn(scores[:size], accepted)
        learned = perf_counter()
        controller.observe(size, 1 + len(accepted), 5.4e-3, 5e-3)
        taken.append([*np.diff(clock).tolist(), learned - back, perf_counter() - learned])
        sizes[size] += 1
    growth, size_, learning, observing = 1e6 * np.median(taken, axis=0)
    middle, common = 1e6 * np.median(np.sum(taken, axis=1)), sizes.most_common(3)
    parts = f"stages {growth:.0f}, size {size_:.0f}, learning {learning:.0f}, observing {observing:.0f}"
    print(f"{middle:.0f} us a step; {parts}; sizes {common}")


WARM_UP = 20
VOCABULARY, LIKELY = 20_000, 65_536


class MadeUpTexts:
    """Texts in which each token decides the next one, and two tokens what else is likely."""

    def __init__(self) -> None:
        rng, self._luck = np.random.default_rng(0), Random(0)
        order = rng.permutation(VOCABULARY).tolist()
        self.all = [*order, *order[:9]]
        self.following = dict(pairwise(self.all))
        self._others = rng.integers(0, VOCABULARY, (LIKELY, WIDTH - 1)).astype(np.int32)
        self._others |= np.sort(rng.integers(20, 120, (LIKELY, WIDTH - 1)))[:, ::-1].astype(np.int32) << BITS

    def after(self, token: int, count: int) -> list[int]:
        """The tokens that follow one."""
        tokens = list[int]()
        for _ in range(count):
            token = self.following[token]
            tokens.append(token)
        return tokens

    def rows(self, tokens: list[int]) -> Ints:
        """Entries of the logits at all tokens but the first."""
        luck = self._luck.getrandbits(2)
        others = self._others[[(31 * before + last + luck) % LIKELY for before, last in pairwise(tokens)]]
        best = np.array([200 << BITS | self.following[token] for token in tokens[1:]], np.int32)
        return np.ascontiguousarray(np.concatenate([best[:, None], others], axis=1))


@app.command()
def engine(
    requests: Annotated[list[int] | None, typer.Option(help="requests of a pass; may be repeated")] = None,
    drafted: Annotated[int, typer.Option(help="tokens drafted for each request")] = 4,
    steps: int = 50,
    pass_ms: Annotated[float, typer.Option(help="time to sleep in place of each pass")] = 0.0,
) -> None:
    """CPU time of `EngineDrafter.propose` and `learn_batch`, which neighbours change less; median and least."""
    spent, texts = Counter[str](), MadeUpTexts()
    for owner, name in (engine_drafter.Requests, "propose"), (engine_drafter, "learn_requests"):
        setattr(owner, name, timed(getattr(owner, name), name, spent, thread_time))
    for count in requests or [64, 256]:
        drafter, names, rng = lade.EngineDrafter(VOCABULARY, price=1e-3), list(range(count)), Random(0)
        drafter.memory.learn(tails_of(np.array(texts.all), 1, len(texts.all) - 1), texts.rows(texts.all))
        for name in names:
            drafter.begin(name, texts.after(rng.randrange(VOCABULARY), 100))
        taken, accepted = list[list[float]](), 0
        for _ in range(steps + WARM_UP):
            spent.clear()
            start = thread_time()
            drafts = drafter.propose(names, drafted)
            proposed = thread_time()
            sleep(1e-3 * pass_ms)
            ends = [drafter.text(name)[-2:] for name in names]
            tokens = [texts.after(end[1], 1 + len(draft)) for end, draft in zip(ends, drafts, strict=True)]
            tokens = [new[: len(draft.path(new))] for new, draft in zip(tokens, drafts, strict=True)]
            rows = [texts.rows([*end, *draft.ids]) for end, draft in zip(ends, drafts, strict=True)]
            accepted += sum(map(len, tokens)) if len(taken) >= WARM_UP else 0
            back = thread_time()
            drafter.learn_batch(names, tokens, rows)
            taken.append([proposed - start, thread_time() - back, spent["propose"], spent["learn_requests"]])
        own = np.median(1e3 * np.array(taken[WARM_UP:]), axis=0)
        least = np.min(1e3 * np.array(taken[WARM_UP:]), axis=0)
        parts = ", ".join(
            f"{name} {own[at]:.3f} ({least[at]:.3f}), compiled {own[at + 2]:.3f} ({least[at + 2]:.3f})"
            for at, name in enumerate(("propose", "learn_batch"))
        )
        print(f"{count} requests: {own[0] + own[1]:.3f} ms; {parts}; {accepted / steps / count:.1f} tokens a request")


if __name__ == "__main__":
    app()

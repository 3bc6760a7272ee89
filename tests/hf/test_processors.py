"""Everything that transformers turns into processors and criteria, combined at random, against plain decoding."""

import asyncio
import functools
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from same_as_plain import Listener, Spelled, processing
from transformers import AsyncTextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import lade
from lade import LookaheadConfig
from lade.testing import toy_model

MODEL = toy_model(dtype=torch.float32, vocabulary=32)
tokens = st.integers(0, 31)
prompts = st.lists(tokens, min_size=1, max_size=8)
configs = st.sampled_from(
    [LookaheadConfig(budget=20), *(LookaheadConfig(*sizes) for sizes in ((7, 5, 7), (3, 3, 4), (0, 4, 5), (2, 2, 0)))]
)


def only_even(batch: int, input_ids: torch.Tensor) -> list[int]:
    """For `prefix_allowed_tokens_fn`: after an odd token an even one must come."""
    assert batch == 0
    return list(range(0, 32, 2)) if int(input_ids[-1]) % 2 else list(range(32))


def stop_at_sum(total: int) -> Callable[..., torch.Tensor]:
    """A user's criterion: ends when the last two ids add up to a number."""
    return lambda input_ids, scores, **kwargs: input_ids[:, -2:].sum(dim=-1) == total


class CountedPenalty:
    """A user's processor with a memory: what it does depends on how often it has been called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[:, self.calls % 32] -= 3.0  # in place, as plain decoding allows
        return scores


options = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 30)},
    optional={
        **processing(32),
        "forced_bos_token_id": tokens,
        "prefix_allowed_tokens_fn": st.just(only_even),
        "eos_token_id": st.lists(tokens, min_size=1, max_size=4, unique=True),
        "stopping_criteria": st.integers(0, 62).map(stop_at_sum).map(lambda criterion: [criterion]),
        "logits_processor": st.just(CountedPenalty),
    },
)


def outcome(generate: Callable[..., torch.Tensor], seed: int, **arguments: Any) -> Any:
    """Tokens and the generator's state; or the error, where plain decoding has one."""
    made = {name: [value()] if value is CountedPenalty else value for name, value in arguments.items()}
    torch.manual_seed(seed)
    try:
        output = generate(**made)
    except (RuntimeError, ValueError) as error:  # contradicting constraints leave no token, or make transformers refuse
        return type(error)
    return output.tolist(), torch.random.get_rng_state().tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning")
@settings(max_examples=examples(100))
@given(prompt=prompts, config=configs, arguments=options, seed=st.integers(0, 50))
def test_all_of_them_at_once(prompt, config, arguments, seed):
    if "exponential_decay_length_penalty" in arguments or "forced_eos_token_id" in arguments:
        arguments = {"eos_token_id": [3], **arguments}  # plain decoding asks for one, too
    arguments["input_ids"] = torch.tensor([prompt])
    expected = outcome(MODEL.generate, seed, **arguments)
    assert outcome(lade.generate, seed, model=MODEL, lookahead=config, **arguments) == expected


def recording(book: list[Any]) -> dict[str, Any]:
    """A processor, a criterion and a streamer that write down in one book what they are shown."""

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        book.append(("processor", input_ids.tolist(), scores.shape, scores.dtype, int(scores.argmax())))
        return scores

    def criterion(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        book.append(("criterion", input_ids.tolist(), scores, kwargs))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    class Streamer(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            book.append(("put", value.tolist()))

        def end(self) -> None:
            book.append("end")

    return {"logits_processor": [processor], "stopping_criteria": [criterion], "streamer": Streamer()}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("eos", [None, [3, 5]])
def test_processors_criteria_and_streamers_are_called_in_the_order_of_plain_decoding(do_sample, eos):
    books: list[list[Any]] = []
    arguments = {"input_ids": torch.tensor([[1, 2, 1, 2, 1]]), "max_new_tokens": 40, "do_sample": do_sample}
    for generate in (MODEL.generate, functools.partial(lade.generate, MODEL)):
        books.append([])
        torch.manual_seed(4)
        generate(eos_token_id=eos, **arguments, **recording(books[-1]))
    assert books[0] == books[1]
    assert len(books[0]) > 4


def stopped_by_its_streamer(generate: Callable[..., torch.Tensor], count: int) -> torch.Tensor:
    """What is decoded with a criterion that ends the text once the streamer has got so many tokens."""
    listener = Listener()

    def enough(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((1,), len(listener.received) > count)  # the prompt is the first call

    ids = torch.tensor([[1, 2, 1, 2, 1, 2]])
    return generate(input_ids=ids, max_new_tokens=60, stopping_criteria=[enough], streamer=listener)


@pytest.mark.parametrize("through", ["lade.generate", "decoder"])
def test_a_criterion_that_watches_the_streamer_stops_where_it_does_in_plain_decoding(through):
    stats = lade.Stats()

    def ours(streamer: BaseStreamer, **arguments: Any) -> torch.Tensor:
        arguments |= {"lookahead": LookaheadConfig(budget=20), "stats": stats}
        if through == "lade.generate":
            return lade.generate(MODEL, streamer=streamer, **arguments)
        return MODEL.generate(custom_generate=lade.decoder(streamer=streamer), **arguments)

    for count in (1, 4, 9, 12, 13, 14, 20):
        assert torch.equal(stopped_by_its_streamer(ours, count), stopped_by_its_streamer(MODEL.generate, count))
    assert max(stats.accepted) > 1


@pytest.mark.parametrize("way", ["lade.generate", "custom_generate"])
def test_an_asynchronous_streamer_hears_everything(way):
    ids = torch.tensor([[1, 2, 1, 2]])

    async def read() -> str:
        streamer = AsyncTextIteratorStreamer(Spelled())
        call = functools.partial(lade.generate, MODEL, streamer=streamer)
        if way == "custom_generate":
            call = functools.partial(MODEL.generate, custom_generate=lade.decoder(streamer=streamer))
        thread = Thread(target=call, kwargs={"input_ids": ids, "max_new_tokens": 30})
        thread.start()
        text = "".join([piece async for piece in streamer])
        thread.join()
        return text

    heard = [int(word) for word in asyncio.run(read()).split()]
    assert heard == MODEL.generate(ids, max_new_tokens=30)[0].tolist()

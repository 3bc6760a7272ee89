import json
import signal

import pytest
import torch
from rich.console import Console
from rich.text import Text

from lade.cli.demo import rounds
from lade.cli.demo import screen as views
from lade.cli.demo.screen import LiveView, Tail, summary, verdict
from lade.cli.demo.side_by_side import Noise, Race
from lade.cli.loading.load import load
from lade.cli.options.decoding import Choices
from lade.cli.options.model import Loading
from lade.cli.terminal import Terminal, terminal
from lade.config import LookaheadConfig
from lade.memory import Memory
from lade.stats import distinct_ngrams

PROMPT = "say it again, say it"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The memory of the last rounds learns from a text or two only."""
    monkeypatch.setattr(rounds, "_LEARNING_S", 0.05)


@pytest.fixture
def loaded(folder):
    with terminal() as term:
        return load(Loading(str(folder), device="cpu"), term=term)


@pytest.fixture
def race(loaded):
    def make(new=30, **choices):
        config = LookaheadConfig(budget=8)  # what the method chooses by itself depends on the clock
        return Race(loaded, loaded.encode(PROMPT), config, new, Choices(**choices).settled())

    return make


def test_both_lanes_write_what_plain_generate_writes(race, plain, tokenizer):
    run = race()
    frames = []
    run.run(draw=lambda: frames.append((run.plain.stats.new_tokens, run.lookahead.stats.new_tokens)))
    expected = plain(tokenizer(PROMPT)["input_ids"], 30)
    assert run.plain.token_ids == run.lookahead.token_ids == expected
    assert run.same and verdict(run) == "same text"
    assert run.plain.text == run.lookahead.text == tokenizer.decode(expected)
    assert (run.plain.stats.steps, run.plain.stats.generations) == (29, 1)
    assert run.lookahead.stats.steps < 29
    assert frames[-1] == (30, 30)
    assert any(0 < slow < 30 and 0 < fast < 30 for slow, fast in frames), "the lanes take turns"


def test_neither_waiting_nor_drawing_counts(race, monkeypatch):
    """On a clock that only drawing moves, nothing else takes any time."""
    import lade.cli.demo.side_by_side as module

    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    run = race(8)

    def draw():
        now[0] += 1000.0

    run.run(draw)
    assert run.plain.stats.decode_s == 0.0
    assert run.lookahead.stats.decode_s < 100.0


def test_a_difference_is_said_loudly(lade, folder, monkeypatch):
    from lade.cli.demo.side_by_side import Lane

    original = Lane.take

    def take(self, step):
        original(self, step)
        if self.stats.new_tokens > 5 and step.sources != ["bonus"] and step.fed > 1:
            self.token_ids[-1] = 999

    monkeypatch.setattr(Lane, "take", take)
    result = lade("demo", "-m", folder, "-p", PROMPT, "-n", 20, "--window", 4)
    assert result.exit_code == 1
    assert "THE TEXTS DIFFER from token" in result.stdout and "THE TEXTS DIFFER" in result.stderr
    assert "│ DIFFER │" in result.stdout and "tokens are those of" not in result.stdout


def test_demo_in_a_pipe(lade, folder, plain, tokenizer):
    result = lade("demo", "-m", folder, "-p", PROMPT, "-n", 20)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert PROMPT + tokenizer.decode(plain(tokenizer(PROMPT)["input_ids"], 20)) in result.stdout
    assert result.stdout.count("=== ") == 2 and result.stdout.count("same text") == 2
    assert "=== 1 of 2 · adaptive · greedy" in result.stdout and "=== 2 of 2 · memory kept · greedy" in result.stdout
    assert "20 tokens · 19 passes" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_sentences_at_the_end_are_those_of_the_table(lade, folder):
    lines = lade("demo", "-m", folder, "-p", PROMPT, "-n", 20).stdout.splitlines()
    *_, equal, first, second = lines
    assert equal == "All 40 tokens are those of transformers' own model.generate."
    rows = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    (cold, kept) = (next(row for row in rows if row[0] == name)[5] for name in ("adaptive", "memory kept"))
    assert first == f"adaptive: {cold} times as fast"
    assert second.startswith(f"memory kept: {kept} times as fast (it had learned from ")


def test_demo_json(lade, folder, plain, tokenizer):
    result = lade("demo", "-m", folder, "-p", PROMPT, "-n", 20, "--json", "--window", 3, "--ngram", 3)
    found = json.loads(result.stdout)
    (race,) = found["races"]
    expected = plain(tokenizer(PROMPT)["input_ids"], 20)
    assert race["plain"]["token_ids"] == race["lookahead"]["token_ids"] == expected
    assert (race["do_sample"], race["temperature"], race["seed"]) == (False, None, None)
    assert race["same_tokens"] is True and race["method"] == "lookahead" and found["memory_texts"] == 0
    assert race["speedup"] == pytest.approx(race["plain"]["decode_s"] / race["lookahead"]["decode_s"])
    assert found["speedups"] == {"lookahead": race["speedup"]}
    assert race["plain"]["distinct_4grams"] == distinct_ngrams(expected)


def test_the_adaptive_method_is_shown_and_then_with_a_memory_of_other_texts(lade, folder, plain, tokenizer):
    found = json.loads(lade("demo", "-m", folder, "-p", PROMPT, "-n", 40, "--json").stdout)
    cold, kept = found["races"]
    assert (cold["method"], kept["method"]) == ("adaptive", "memory kept") == tuple(found["speedups"])
    expected = plain(tokenizer(PROMPT)["input_ids"], 40)
    assert cold["lookahead"]["token_ids"] == kept["lookahead"]["token_ids"] == expected
    assert found["memory_texts"] > 0 and found["same_tokens"] is True


def test_a_memory_learns_from_other_texts_than_those_shown(loaded, monkeypatch):
    from lade.embedded import files as embedded
    from lade.hf import generate

    shown, read = embedded.prompts()[:3], []
    subject, memory = loaded, Memory()
    monkeypatch.setattr(generate, "stream", lambda model, **arguments: read.append(arguments) or iter([]))
    learned = rounds.learn(subject, memory, shown, 8)
    texts = [subject.tokenizer.decode(arguments["input_ids"][0]) for arguments in read]
    assert learned == len(texts) == len(set(texts)) > 10 and not set(shown) & set(texts)
    assert all(arguments["lookahead"].memory is memory for arguments in read)


def sample(model, tokenizer, seed, temperature, new=20):
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    torch.manual_seed(seed)
    output = model.generate(ids, max_new_tokens=new, do_sample=True, temperature=temperature)
    return output[0, ids.shape[1] :].tolist()


def test_lanes_that_sample_have_a_generator_each(race, model, tokenizer):
    run = race(20, do_sample=True, temperature=2.0, seed=6)
    before, frames = torch.get_rng_state(), []
    run.run(draw=lambda: frames.append((run.plain.stats.new_tokens, run.lookahead.stats.new_tokens)))
    assert torch.equal(torch.get_rng_state(), before)
    assert run.plain.token_ids == run.lookahead.token_ids == sample(model, tokenizer, 6, 2.0)
    assert any(0 < slow < 20 and 0 < fast < 20 for slow, fast in frames), "the lanes take turns"


def test_noise_kept_aside_goes_on_where_it_was():
    cpu = torch.device("cpu")
    first, second = Noise(3, cpu), Noise(3, cpu)
    torch.manual_seed(3)
    expected = [torch.rand(()).item() for _ in range(4)]
    outside = torch.get_rng_state()
    for noise in (first, second):
        drawn = []
        for _ in range(4):
            with noise.taken():
                with Noise(8, cpu).taken():
                    torch.rand(())  # another one's, amid a turn
                drawn.append(torch.rand(()).item())
        assert drawn == expected
    assert torch.equal(torch.get_rng_state(), outside)


def test_the_demo_samples_if_asked(lade, folder, model, tokenizer):
    arguments = ["demo", "-m", folder, "-p", PROMPT, "-n", 20, "--temperature", 1.5, "--seed", 4]
    for race in json.loads(lade(*arguments, "--json").stdout)["races"]:
        assert race["plain"]["token_ids"] == race["lookahead"]["token_ids"] == sample(model, tokenizer, 4, 1.5)
        assert (race["do_sample"], race["temperature"], race["seed"]) == (True, 1.5, 4)
    shown = lade(*arguments).stdout
    assert "=== 2 of 2 · memory kept · sampled, temperature 1.5, seed 4" in shown
    assert "\n2*          │ same" in shown and "*: sampled, temperature 1.5, seed 4" in shown
    assert lade("demo", "--temperature", -1).exit_code == 2


def test_the_embedded_model_is_what_the_demo_shows(lade):
    result = lade("demo", "--limit", 1, "-n", 12, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["same_tokens"] is True


def test_ctrl_c_ends_the_demo(lade, folder, monkeypatch):
    monkeypatch.setattr(Race, "run", lambda self, draw: signal.raise_signal(signal.SIGINT))
    result = lade("demo", "-m", folder, "-p", PROMPT)
    assert result.exit_code == 130
    assert "Traceback" not in result.output and "interrupted" in result.stderr


def test_the_live_view_shows_both_lanes_in_colour(race):
    run = race(12)
    with terminal() as term:
        term.out = Console(force_terminal=True, color_system="truecolor", width=100, height=20, record=True)
        with LiveView(term, "prompt 1 of 1", PROMPT, run) as view:
            run.run(view.draw)
        term.out.print(summary([run, run]))
    text = term.out.export_text(clear=False)
    assert "plain" in text and "lookahead" in text and "12 tokens, 11 passes: 1.00 each" in text
    assert "as it runs" in text and f"same text, {run.speedup:.2f} times as fast" in text
    assert "22 / " in text, "the passes of both rounds together"


def test_a_tail_is_the_end_of_a_text():
    console = Console(width=10)
    lines = console.render_lines(Tail(Text("one\ntwo\nthree"), 2), console.options, pad=False)
    assert ["".join(segment.text for segment in line) for line in lines] == ["two", "three"]
    assert len(console.render_lines(Tail(Text("one"), 4), console.options)) == 4


def test_distinct_ngrams():
    assert distinct_ngrams([1, 2, 3]) == 1.0
    assert distinct_ngrams([7] * 7) == 0.25
    assert distinct_ngrams(range(20)) == 1.0


@pytest.mark.slow
def test_info(lade, folder, model):
    facts = json.loads(lade("info", "-m", folder, "--json").stdout)
    assert facts["class"] == "LlamaForCausalLM"
    assert facts["supported"] is True and facts["reason"] is None
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert (facts["layers"], facts["context"], facts["vocabulary"]) == (2, 512, 257)
    assert (facts["dtype"], facts["device"], facts["attention"]) == ("float32", "cpu", "sdpa")
    assert facts["torch"] == torch.__version__
    assert lade("info", "-m", folder, "--dtype", "bfloat16", "--json").stdout.count("bfloat16") == 1
    shown = lade("info", "-m", folder)
    assert shown.exit_code == 0 and "supported" in shown.stdout and "yes" in shown.stdout


def test_info_takes_the_model_as_an_argument_too(lade, folder, unsupported):
    assert lade("info", folder, "--json").stdout == lade("info", "-m", folder, "--json").stdout
    facts = json.loads(lade("info", unsupported, "-m", folder, "--json").stdout)
    assert facts["model"] == str(unsupported)


def test_info_says_why_not(lade, unsupported):
    facts = json.loads(lade("info", "-m", unsupported, "--json").stdout)
    assert facts["supported"] is False and "mask" in facts["reason"]
    assert "no" in lade("info", "-m", unsupported).stdout


def test_info_without_a_model_shows_the_embedded_one(lade):
    facts = json.loads(lade("info", "--json").stdout)
    assert (facts["model"], facts["supported"], facts["dtype"]) == ("embedded", True, "float32")


def test_a_race_can_be_seen_as_it_stood_at_any_time(race):
    run = race(20)
    run.run(draw=lambda: None)
    for lane, now in zip((run.plain, run.lookahead), run.at(0.0), strict=True):
        assert now.token_ids == lane.token_ids[:1] and (now.stats.steps, now.stats.decode_s) == (0, 0.0)
    middle = run.plain.stats.decode_s / 2
    plain, fast = run.at(middle)
    assert 1 < len(plain.token_ids) < 20 and plain.stats.decode_s <= middle
    assert run.plain.text.startswith(plain.text) and len(plain.text) < len(run.plain.text)
    assert fast.token_ids == run.lookahead.token_ids[: len(fast.token_ids)]
    assert run.at(run.seconds) == (run.plain, run.lookahead)


def test_a_replay_takes_so_many_times_longer(race, monkeypatch):
    run, now, seen = race(20), [0.0], []
    run.run(draw=lambda: None)
    monkeypatch.setattr(views, "perf_counter", lambda: now[0])
    monkeypatch.setattr(views, "sleep", lambda seconds: now.__setitem__(0, now[0] + run.seconds))
    monkeypatch.setattr(run, "at", lambda seconds: seen.append(seconds) or (run.plain, run.lookahead))
    with terminal() as term, LiveView(term, "title", PROMPT, run) as view:
        view.replay(4.0)
    assert seen == pytest.approx([run.seconds * share for share in (0, 0.25, 0.5, 0.75)])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("arguments", "seconds", "slower"),
    [([], 0.2, 20.0), ([], 2.0, None), (["--slow-motion", 7], 0.2, 7.0), (["--slow-motion", 1], 0.2, None)],
)
def test_what_is_too_fast_to_follow_is_replayed(lade, folder, monkeypatch, arguments, seconds, slower):
    replayed = []
    monkeypatch.setattr(Race, "seconds", seconds)
    monkeypatch.setattr(LiveView, "replay", lambda self, slower: replayed.append(slower))
    monkeypatch.setattr(Terminal, "interactive", True)
    result = lade("demo", "-m", folder, "-p", PROMPT, "-n", 8, "--window", 2, *arguments)
    assert result.exit_code == 0, result.output
    assert replayed == ([] if slower is None else pytest.approx([slower]))

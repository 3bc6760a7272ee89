import io
import json
import signal
from copy import deepcopy

import pytest
import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoModelForCausalLM

from lade.cli.demo import command, rounds
from lade.cli.demo import screen as views
from lade.cli.demo.race import COLOURS, Lane, Race, Recorder, style_of
from lade.cli.demo.screen import LiveView, Tail, summary, verdict
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
    def make(new=30, unpacked=None, **choices):
        config = LookaheadConfig(budget=8)  # what the method chooses by itself depends on the clock
        return Race(loaded, loaded.encode(PROMPT), config, new, Choices(**choices).settled(), unpacked=unpacked)

    return make


def test_all_lanes_write_what_plain_generate_writes(race, plain, tokenizer):
    run = race()
    frames = []
    run.run(draw=lambda: frames.append([lane.stats.new_tokens for lane in run.lanes]))
    expected = plain(tokenizer(PROMPT)["input_ids"], 30)
    assert [lane.name for lane in run.lanes] == ["model.generate", "prompt lookup", "lookahead"]
    assert all(lane.token_ids == expected and lane.text == tokenizer.decode(expected) for lane in run.lanes)
    assert run.same and verdict(run) == "same text"
    assert (run.plain.stats.steps, run.plain.stats.generations) == (29, 1)
    assert run.lookahead.stats.steps < 29
    assert frames[-1] == [30, 30, 30]
    assert all(frame[0] == 30 for frame in frames if frame[1]), "one method at a time"


def test_a_race_with_a_memory_takes_over_the_other_lanes_of_the_race_without(loaded, race):
    first = race()
    first.run(draw=lambda: None)
    ids, config = loaded.encode(PROMPT), LookaheadConfig(budget=8)
    second = Race(loaded, ids, config, 30, first.choices, "again", earlier=first)
    steps = first.plain.stats.steps
    second.run(draw=lambda: None)
    assert second.plain is first.plain and first.plain.stats.steps == steps, "generated once"
    assert second.same and second.lookahead is not first.lookahead
    shown = table([first, second])
    assert [row[1] for row in shown] == ["model.generate", "prompt lookup", "lookahead", "again"]


def test_drawing_does_not_count(race, monkeypatch):
    """On a clock that only drawing moves, nothing else takes any time."""
    import lade.cli.demo.race as module

    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    run = race(8)

    def draw():
        now[0] += 1000.0

    run.run(draw)
    assert run.plain.stats.decode_s == run.rivals[1].stats.decode_s == 0.0
    assert run.lookahead.stats.decode_s < 100.0


def test_tokens_are_coloured_by_their_source(tokenizer):
    lane = Lane("prompt lookup", tokenizer, [1])
    recorder = Recorder(lane, lambda: None)
    for ids in (tokenizer("prompt"), tokenizer("a"), tokenizer("bcd"), tokenizer("e")):
        recorder.put(torch.tensor(ids["input_ids"][-3:]))
    assert lane.pieces == [("a", ""), ("bc", COLOURS["earlier text"]), ("d", ""), ("e", "")]
    assert (lane.stats.steps, lane.stats.new_tokens, lane.stats.tokens_per_step) == (2, 5, 2.0)
    assert style_of("memory") == style_of("window") != style_of("text") == style_of("prompt") != style_of("mtp")
    assert style_of("bonus") == style_of("prefill") == ""


def table(races):
    """Cells of the summary, without its lines."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary(races))
    rows = [[cell.strip() for cell in line.split("│")] for line in console.export_text().splitlines() if "│" in line]
    return rows


def test_losses_are_shown(race):
    slow, fast = race(), race()
    for run, seconds in ((slow, 4.0), (fast, 1.0)):
        run.run(draw=lambda: None)
        for lane in run.lanes:
            lane.stats.decode_s = 2.0
        run.lookahead.stats.decode_s = seconds
    rows = table([slow, fast])
    speeds = [row[4] for row in rows if row[1] == "lookahead"]
    assert speeds == ["0.50", "2.00", "0.80"], "the last one is for both texts: 4 s against 5 s"
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(summary([slow, fast]))
    text = console.export_text(styles=True)
    assert [line for line in text.splitlines() if "\x1b[31m" in line and "0.50" in line]
    assert views.conclusion([slow, fast], 0).endswith("lookahead: 0.80 times as fast; slower on 1 of 2 prompts")


def test_a_difference_is_said_loudly(lade, folder, monkeypatch):
    original = Lane.take

    def take(self, step):
        original(self, step)
        if self.name == "lookahead" and self.stats.new_tokens > 5:
            self.token_ids[-1] = 999

    monkeypatch.setattr(Lane, "take", take)
    result = lade("demo", "-m", folder, "-p", PROMPT, "-n", 20, "--window", 4)
    assert result.exit_code == 1
    assert "THE TEXTS DIFFER from token" in result.stdout and "THE TEXTS DIFFER" in result.stderr
    assert "│ DIFFERS" in result.stdout and "tokens are those of" not in result.stdout


def test_demo_in_a_pipe(lade, folder, plain, tokenizer):
    result = lade("demo", "-m", folder, "-p", PROMPT, "-n", 20)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert PROMPT + tokenizer.decode(plain(tokenizer(PROMPT)["input_ids"], 20)) in result.stdout
    assert result.stdout.count("=== ") == 2 and result.stdout.count("same text") == 2
    assert "=== 1 of 2 · lade · greedy" in result.stdout
    assert "=== 2 of 2 · lade, memory kept · greedy" in result.stdout
    assert "model.generate: 20 tokens · 19 passes · 1.00 a pass" in result.stdout
    assert "prompt lookup: 20 tokens · " in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_sentences_at_the_end_are_those_of_the_table(lade, folder):
    lines = lade("demo", "-m", folder, "-p", PROMPT, "-n", 20).stdout.splitlines()
    equal = lines.index("All 40 tokens are those of transformers' own model.generate.")
    rows = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    (cold, kept) = (next(row for row in rows if row[1] == name)[4] for name in ("lade", "lade, memory kept"))
    assert lines[equal + 1].startswith(f"lade: {cold} times as fast")
    assert lines[equal + 2].startswith(f"lade, memory kept: {kept} times as fast (filled from ")


def test_the_demo_ends_with_the_lines_for_a_model_of_ones_own(lade, folder, tokenizer):
    import lade as library

    model = AutoModelForCausalLM.from_pretrained(folder)
    *_, empty, first, second, third = lade("demo", "-m", folder, "-p", PROMPT, "-n", 4).stdout.splitlines()
    assert empty == "" and all(line.startswith("    ") for line in (first, second, third))
    names = {"lade": library, "model": model, "inputs": tokenizer(PROMPT, return_tensors="pt")}
    exec("\n".join(line.strip() for line in (first, second, third)), names)
    assert names["output"].shape[0] == 1


def test_what_packing_alone_brings_has_a_row_of_its_own(loaded, race):
    run = race(unpacked=deepcopy(loaded.model))
    run.run(draw=lambda: None)
    assert [lane.name for lane in run.lanes] == ["model.generate", "prompt lookup", "packed weights alone", "lookahead"]
    assert len({tuple(lane.token_ids) for lane in run.lanes}) == 1
    assert [row[1] for row in table([run])] == [lane.name for lane in run.lanes]
    assert [lane.name for lane in run.at(0.0)] == ["model.generate", "prompt lookup", "lookahead"]
    assert run.as_dict()["packed"]["steps"] == 29


def test_the_embedded_model_is_padded_unless_one_says_no(lade):
    arguments = ["demo", "--limit", 1, "-n", 5]
    padded = json.loads(lade(*arguments, "--inflate", "12e6", "--json").stdout)
    own = json.loads(lade(*arguments, "--inflate", 0, "--json").stdout)
    assert padded["parameters"] == pytest.approx(12e6, rel=0.05) and own["parameters"] < 4e6
    texts = [[race["lookahead"]["token_ids"] for race in found["races"]] for found in (padded, own)]
    assert texts[0] == texts[1] and padded["memory_texts"] > 0
    shown = lade(*arguments, "--inflate", "12e6").stdout
    assert shown.count("padded to 12 million") == 2, "at the beginning and at the end"
    assert "It has an MTP layer, which most models lack" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--inflate", -1], "--inflate -1"),
        (["--inflate", "inf"], "--inflate inf"),
        (["--inflate", "100e6", "-m", "FOLDER"], "--inflate 100000000.0: pads the embedded model"),
    ],
)
def test_padding_has_its_limits(lade, folder, arguments, message):
    result = lade("demo", *(folder if word == "FOLDER" else word for word in arguments))
    assert result.exit_code == 2 and message in result.stderr


def test_a_slow_model_writes_fewer_tokens(lade, folder, monkeypatch):
    for rate, tokens in ((1.0, 40), (15.0, 60), (1000.0, 120)):
        monkeypatch.setattr(Lane, "tokens_per_s", rate)
        found = json.loads(lade("demo", "-m", folder, "-p", PROMPT, "--window", 2, "--json").stdout)
        assert found["races"][0]["plain"]["new_tokens"] == tokens


def test_demo_json(lade, folder, plain, tokenizer):
    result = lade("demo", "-m", folder, "-p", PROMPT, "-n", 20, "--json", "--window", 3, "--ngram", 3)
    found = json.loads(result.stdout)
    (race,) = found["races"]
    expected = plain(tokenizer(PROMPT)["input_ids"], 20)
    assert race["plain"]["token_ids"] == race["lookahead"]["token_ids"] == expected
    assert (race["do_sample"], race["temperature"], race["seed"]) == (False, None, None)
    assert race["prompt_lookup"]["token_ids"] == expected
    assert race["same_tokens"] is True and race["method"] == "lookahead" and found["memory_texts"] == 0
    assert race["speedup"] == pytest.approx(race["plain"]["decode_s"] / race["lookahead"]["decode_s"])
    assert found["speedups"] == {"lookahead": pytest.approx(race["speedup"])}
    assert race["plain"]["distinct_4grams"] == distinct_ngrams(expected)


def test_the_adaptive_method_is_shown_and_then_with_a_memory_of_other_texts(lade, folder, plain, tokenizer):
    found = json.loads(lade("demo", "-m", folder, "-p", PROMPT, "-n", 40, "--json").stdout)
    cold, kept = found["races"]
    assert (cold["method"], kept["method"]) == ("lade", "lade, memory kept") == tuple(found["speedups"])
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


def test_lanes_that_sample_begin_with_the_same_seed(race, model, tokenizer):
    run = race(20, do_sample=True, temperature=2.0, seed=6)
    run.run(draw=lambda: None)
    assert run.plain.token_ids == run.lookahead.token_ids == sample(model, tokenizer, 6, 2.0)
    assert [lane.name for lane in run.lanes] == ["model.generate", "lookahead"], "lookup has other samples"


def test_the_demo_samples_if_asked(lade, folder, model, tokenizer):
    arguments = ["demo", "-m", folder, "-p", PROMPT, "-n", 20, "--temperature", 1.5, "--seed", 4]
    for race in json.loads(lade(*arguments, "--json").stdout)["races"]:
        assert race["plain"]["token_ids"] == race["lookahead"]["token_ids"] == sample(model, tokenizer, 4, 1.5)
        assert (race["do_sample"], race["temperature"], race["seed"]) == (True, 1.5, 4)
    shown = lade(*arguments).stdout
    assert "=== 2 of 2 · lade, memory kept · sampled, temperature 1.5, seed 4" in shown
    assert lade("demo", "--temperature", -1).exit_code == 2


def test_the_embedded_model_is_what_the_demo_shows(lade):
    result = lade("demo", "--limit", 1, "-n", 12, "--json", "--inflate", 0)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["same_tokens"] is True


def test_ctrl_c_ends_the_demo(lade, folder, monkeypatch):
    monkeypatch.setattr(Race, "run", lambda self, draw: signal.raise_signal(signal.SIGINT))
    result = lade("demo", "-m", folder, "-p", PROMPT)
    assert result.exit_code == 130
    assert "Traceback" not in result.output and "interrupted" in result.stderr


def test_the_live_view_shows_all_lanes_in_colour(race):
    run = race(12)
    with terminal() as term:
        term.out = Console(force_terminal=True, color_system="truecolor", width=100, height=20, record=True)
        with LiveView(term, "prompt 1 of 1", PROMPT, run) as view:
            run.run(view.draw)
    text = term.out.export_text(clear=False)
    assert "model.generate" in text and "prompt lookup" in text and "lookahead" in text and "12 tokens, " in text
    assert "one method at a time" in text and f"same text, {run.speedup:.2f} times as fast" in text


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
    for lane, now in zip(run.lanes, run.at(0.0), strict=True):
        first = 1 if lane.name != "prompt lookup" else len(now.token_ids)  # which guesses in its first pass
        assert now.token_ids == lane.token_ids[:first] and (now.stats.steps, now.stats.decode_s) == (0, 0.0)
    middle = run.plain.stats.decode_s / 2
    plain, _, fast = run.at(middle)
    assert 1 < len(plain.token_ids) < 20 and plain.stats.decode_s <= middle
    assert run.plain.text.startswith(plain.text) and len(plain.text) < len(run.plain.text)
    assert fast.token_ids == run.lookahead.token_ids[: len(fast.token_ids)]
    assert run.at(run.seconds) == run.lanes


def test_a_replay_is_in_real_time(race, monkeypatch):
    run, now, seen = race(20), [0.0], []
    run.run(draw=lambda: None)
    monkeypatch.setattr(views, "perf_counter", lambda: now[0])
    monkeypatch.setattr(views, "sleep", lambda seconds: now.__setitem__(0, now[0] + run.seconds / 4))
    monkeypatch.setattr(run, "at", lambda seconds: seen.append(seconds) or run.lanes)
    with terminal() as term, LiveView(term, "title", PROMPT, run) as view:
        view.replay()
    assert seen == pytest.approx([run.seconds * share for share in (0, 0.25, 0.5, 0.75)])


@pytest.mark.parametrize(("limit", "replays"), [(1e9, 2), (0.0, 0)])
def test_a_slow_machine_shows_races_only_once(lade, folder, monkeypatch, limit, replays):
    seen = []
    monkeypatch.setattr(command, "_REPLAYS_UNTIL_S", limit)
    monkeypatch.setattr(LiveView, "replay", lambda self: seen.append(self._race))
    monkeypatch.setattr(Terminal, "interactive", True)
    result = lade("demo", "-m", folder, "-p", PROMPT, "-n", 8)
    assert result.exit_code == 0, result.output
    assert len(seen) == replays

import json
import signal
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from rich.text import Text

from lade.cli import views
from lade.cli.loading import load
from lade.cli.model_options import Loading
from lade.cli.noise import Noise
from lade.cli.options import Choices
from lade.cli.race import Race
from lade.cli.terminal import Terminal, terminal
from lade.cli.views import LiveView, Tail, summary, verdict
from lade.config import LookaheadConfig
from lade.stats import distinct_ngrams

PROMPT = "say it again, say it"


@pytest.fixture
def race(folder):
    def make(new=30, **choices):
        with terminal() as term:
            subject = load(Loading(str(folder), device="cpu"), term=term)
        return Race(subject, subject.encode(PROMPT), LookaheadConfig(), new, Choices(**choices).settled())

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
    import lade.cli.race as module

    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    run = race(8)

    def draw():
        now[0] += 1000.0

    run.run(draw)
    assert run.plain.stats.decode_s == 0.0
    assert run.lookahead.stats.decode_s < 100.0


def test_a_difference_is_said_loudly(lade, folder, monkeypatch):
    from lade.cli.race import Lane

    original = Lane.take

    def take(self, step):
        original(self, step)
        if self.stats.new_tokens > 5 and step.sources != ["bonus"] and step.fed > 1:
            self.token_ids[-1] = 999

    monkeypatch.setattr(Lane, "take", take)
    result = lade("demo", "-m", folder, "-p", PROMPT, "-n", 20)
    assert result.exit_code == 1
    assert "THE TEXTS DIFFER from token" in result.stdout and "THE TEXTS DIFFER" in result.stderr
    assert "│ DIFFER │" in result.stdout


def test_demo_in_a_pipe(lade, folder, plain, tokenizer):
    result = lade("demo", "-m", folder, "-p", PROMPT, "-n", 20)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert PROMPT + tokenizer.decode(plain(tokenizer(PROMPT)["input_ids"], 20)) in result.stdout
    assert "same text" in result.stdout and "20 tokens · 19 passes" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_demo_json(lade, folder, plain, tokenizer):
    result = lade("demo", "-m", folder, "-p", PROMPT, "-n", 20, "--json", "--window", 3, "--ngram", 3)
    race, sampled = json.loads(result.stdout)["races"]
    expected = plain(tokenizer(PROMPT)["input_ids"], 20)
    assert race["plain"]["token_ids"] == race["lookahead"]["token_ids"] == expected
    assert (race["do_sample"], race["temperature"], race["seed"]) == (False, None, None)
    assert (sampled["do_sample"], sampled["temperature"], sampled["seed"]) == (True, 0.7, 0)
    assert race["same_tokens"] is True
    assert race["speedup"] == pytest.approx(race["plain"]["decode_s"] / race["lookahead"]["decode_s"])
    assert race["plain"]["distinct_4grams"] == distinct_ngrams(expected)


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


def test_the_demo_samples_all_rounds_or_the_last(lade, folder, model, tokenizer):
    arguments = ["demo", "-m", folder, "-p", PROMPT, "-n", 20, "--temperature", 1.5, "--seed", 4]
    (race,) = json.loads(lade(*arguments, "--do-sample", "--json").stdout)["races"]
    assert race["plain"]["token_ids"] == race["lookahead"]["token_ids"] == sample(model, tokenizer, 4, 1.5)
    assert race["plain"]["token_ids"] == json.loads(lade(*arguments, "--json").stdout)["races"][1]["plain"]["token_ids"]
    shown = lade(*arguments).stdout
    assert "=== round 1 of 2 · greedy" in shown and "=== round 2 of 2 · sampled, temperature 1.5, seed 4" in shown
    assert "\n2*  │ same" in shown and "*: sampled, temperature 1.5, seed 4" in shown
    assert lade("demo", "--temperature", -1).exit_code == 2


def test_the_embedded_model_is_what_the_demo_shows(lade):
    result = lade("demo", "--prompts", 1, "-n", 12, "--json")
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
    assert "plain" in text and "lookahead" in text and "12 tokens · 11 passes" in text
    assert "all" in text and "24" in text


def test_a_tail_is_the_end_of_a_text():
    console = Console(width=10)
    lines = console.render_lines(Tail(Text("one\ntwo\nthree"), 2), console.options, pad=False)
    assert ["".join(segment.text for segment in line) for line in lines] == ["two", "three"]
    assert len(console.render_lines(Tail(Text("one"), 4), console.options)) == 4


def test_distinct_ngrams():
    assert distinct_ngrams([1, 2, 3]) == 1.0
    assert distinct_ngrams([7] * 7) == 0.25
    assert distinct_ngrams(range(20)) == 1.0


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


def test_info_says_why_not(lade, unsupported):
    facts = json.loads(lade("info", "-m", unsupported, "--json").stdout)
    assert facts["supported"] is False and "mask" in facts["reason"]
    assert "no" in lade("info", "-m", unsupported).stdout


def test_info_without_a_model_shows_the_embedded_one(lade):
    facts = json.loads(lade("info", "--json").stdout)
    assert (facts["model"], facts["supported"], facts["dtype"]) == ("embedded", True, "float32")


def test_slow_motion_waits_until_a_picture_is_due(monkeypatch):
    """At 0.2 s of decoding a picture shown ten times slower is due after two seconds."""
    waited = []
    monkeypatch.setattr(views, "sleep", waited.append)
    monkeypatch.setattr(views, "perf_counter", lambda: 5.0)
    plain, lookahead = (SimpleNamespace(stats=SimpleNamespace(decode_s=seconds)) for seconds in (0.2, 0.1))
    for slow_motion, expected in ((10.0, [2.0]), (1.0, [])):
        waited.clear()
        view = views.LiveView(Terminal(), "title", "", SimpleNamespace(plain=plain, lookahead=lookahead), slow_motion)
        view._begun = view._drawn = 5.0
        view.draw()
        assert waited == pytest.approx(expected)

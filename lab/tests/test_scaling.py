"""Toys at a few sizes: what is measured, kept, gone on with, and compared."""

import json
from dataclasses import replace

import pytest
import torch
from bench_toys import Letters, models, workload
from pretend import not_found
from spies import answered, watched

import lade
from lade.errors import ConfigError, InputError, MissingExtraError
from lade_lab import scaling_law as scaling_figure
from lade_lab import scaling_run as study
from lade_lab.report.theme import DARK, LIGHT
from lade_lab.results import Environment, Mismatch, Model, Settings, Workload
from lade_lab.scaling_law import NAME, Point, Scaling
from lade_lab.scaling_run import Study

NEW = 16
TEXTS = ["HELLOHELLO", "ABCABCABC", "XYZ"]


@pytest.fixture(scope="module")
def toys():
    return models()


@pytest.fixture
def make(toys, tmp_path):
    def study_of(windows=(1, 3), ngrams=(3, 4), *, texts=TEXTS, folder=tmp_path / "out", settings=None, **options):
        return Study(
            toys.plain, Letters(), workload(*([text] for text in texts)), windows, ngrams, record=toys.record,
            settings=settings or Settings(NEW), folder=folder, **options,
        )  # fmt: skip

    return study_of


def test_every_size_is_measured_as_generate_does_it_and_can_be_read_again(make, toys, tmp_path):
    made = make()
    shares = list(made)
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0) and len(shares) == 3 * 5
    found = made.scaling
    assert found.complete and not found.mismatches
    assert [(point.window, point.ngram) for point in found.points] == [(1, 3), (3, 3), (1, 4), (3, 4)]
    for point in found.points:
        stats = lade.Stats()
        config = lade.LookaheadConfig(point.window, point.ngram, point.guesses)
        for text in TEXTS:
            ids = torch.tensor([Letters()(text)["input_ids"]])
            lade.generate(toys.plain, input_ids=ids, max_new_tokens=NEW, lookahead=config, stats=stats, do_sample=False)
        assert point.guesses == point.window and len(point.steps) == 3
        assert point.tokens_per_step == stats.tokens_per_step
        assert point.fed_per_step == pytest.approx(sum(stats.step_tokens) / stats.steps)
    assert Scaling.load(tmp_path / "out" / NAME) == found
    record = json.loads((tmp_path / "out" / NAME).read_text())
    assert record["schema"] == "lade-scaling/1" and set(record["fits"]["lines"]) == {"3", "4"}
    assert record["fits"]["expectation"]["points"] == 4


def test_prompt_ngrams_can_be_left_out(make):
    rates = []
    for prompt_ngrams in (True, False):
        made = make([7], [4], prompt_ngrams=prompt_ngrams, folder=None)
        list(made)
        rates.append(made.scaling.points[0].fed_per_step)
    assert rates[0] > rates[1], "fewer guesses are fed"


def test_more_sizes_can_be_added_and_none_are_measured_twice(make, monkeypatch):
    list(make([1], [3]))
    added = make([2, 1, 2], [3, 4], resume=True)
    assert added.todo == [(2, 3), (1, 4), (2, 4)]
    list(added)
    again = make([1, 2], [3, 4], resume=True)
    measured = [watched(monkeypatch, arm, "complete") for arm in (study.OwnArm, study.TransformersArm)]
    assert list(again) == [1.0] and measured == [[], []] and len(again.scaling.points) == 4 and again.scaling.complete


def test_nothing_is_overwritten_and_other_prompts_of_the_same_names_are_noticed(make, tmp_path):
    list(make([1], [3]))
    before = (tmp_path / "out" / NAME).read_bytes()
    with pytest.raises(InputError, match="--resume"):
        make()
    assert (tmp_path / "out" / NAME).read_bytes() == before
    with pytest.raises(InputError, match="'p1'"):
        list(make([2], [3], resume=True, texts=[TEXTS[0], "OTHER", TEXTS[2]]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"settings": Settings(NEW + 1)}, "settings.max_new_tokens is 17 here, but 16 in"),
        ({"prompt_ngrams": False}, "prompt_ngrams is False here, but True in"),
        ({"texts": TEXTS[:2]}, "workload.prompts is 2 here, but 3 in"),
    ],
)
def test_a_run_goes_on_only_with_what_it_began_with(change, named, make):
    list(make([1], [3]))
    with pytest.raises(InputError, match=named):
        make(resume=True, **change)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "else"}', '{"schema": "lade-scaling/1"}'])
def test_damaged_files(text, make, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / NAME).write_text(text)
    with pytest.raises(InputError, match="another file"):
        make(resume=True)


def test_a_wrong_token_is_a_mismatch(make, toys, monkeypatch):
    def spoil(found, arm, prompt, seed, new_tokens):
        if arm.method.config["window"] == 3 and len(prompt) == 3:
            found.tokens[5] = (found.tokens[5] + 1) % 48

    answered(monkeypatch, study.OwnArm, "complete", spoil)
    made = make()
    list(made)
    places = [(each.method, each.prompt, each.place) for each in made.scaling.mismatches]
    assert places == [("lookahead 3,3,3", "p2", 5), ("lookahead 3,4,3", "p2", 5)]
    assert made.scaling.wrong == made.scaling.mismatches


def test_rounding_excuses_near_ties_in_16_bits_alone(make):
    made = make(folder=None)
    tie = Mismatch("toys", "p0", 0, "lookahead 1,3,1", 0, 0, "hf", 3, 1, 2, 1.0, 1.0, 0.0, near_tie=True)
    wrong = replace(tie, near_tie=False)
    made.scaling.mismatches = [tie, wrong]
    for dtype, found in (("float32", [tie, wrong]), ("float64", [tie, wrong]), ("bfloat16", [wrong])):
        made.scaling.model = replace(made.scaling.model, dtype=dtype)
        assert made.scaling.wrong == found


def test_of_a_conversation_the_first_turn_is_taken(make, toys):
    points = []
    for turns in (["HELLO"], ["HELLO", "AGAIN"]):
        made = Study(toys.plain, Letters(), workload(turns), [2], [3], record=toys.record, settings=Settings(NEW))
        list(made)
        points.append(made.scaling.points)
    assert points[0] == points[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"windows": []}, "windows="), ({"windows": [0, 1]}, "windows="), ({"ngrams": [1]}, "ngrams="),
        ({"settings": Settings(1)}, "max_new_tokens=1"), ({"settings": Settings(9, temperature=1.0)}, "temperature="),
    ],
)  # fmt: skip
def test_what_is_no_law(change, named, make):
    with pytest.raises(ConfigError, match=named):
        make(**change)


def test_folders_that_cannot_be_used(make, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="another --out"):
        make(folder=tmp_path / "file" / "inside")


def law():
    """Made-up points that lie on known lines: S = 1 + 0.1 N log2 T."""
    settings, points = Settings(NEW), []
    for ngram in (3, 5):
        for window in (1, 2, 4, 8, 16):
            fed = 2 * window * (ngram - 1)
            accepted = round(10_000 * (1 + 0.1 * ngram * (fed.bit_length() - 1)))
            points.append(Point(window, ngram, window, [4_000, 6_000], [4_000 * fed, 6_000 * fed], [0, accepted]))
    return Scaling(
        "now", [], Environment("a machine", 1, {}, "Linux", None), Model("small", "llama", 1, "float32"), settings,
        Workload("toys", "jsonl", 2), True, points=points,
    )  # fmt: skip


def test_lines_are_of_one_ngram_length_each():
    found = law()
    assert found.ngrams == [3, 5]
    for ngram in (3, 5):
        line = found.line(ngram)
        assert (line.slope, line.intercept, line.r_squared) == pytest.approx((0.1 * ngram, 1.0, 1.0), abs=1e-3)
    assert found.expectation().points == 10 and found.expectation(3).points == 5


def test_the_law_is_drawn_with_points_and_lines_for_light_and_dark_pages(tmp_path):
    files = scaling_figure.save_figures(law(), tmp_path)
    assert [file.name for file in files] == ["scaling.svg", "scaling.png"]
    assert [file.read_bytes()[:4] for file in files] == [b"<?xm", b"\x89PNG"]
    svg = files[0].read_text()
    assert f"fill: {LIGHT.paper}" in svg and f"fill:{DARK.paper}" in svg
    assert "<dc:date>" not in svg, "which would differ from day to day"
    figure = scaling_figure.draw(law())
    left, right = figure.axes
    labels = [f"N = {ngram}: 0.{ngram}0 a doubling, R² 1.000" for ngram in (3, 5)]
    assert [line.get_label() for line in left.lines][::2] == labels
    assert list(left.lines[0].get_xdata()) == [4.0, 8.0, 16.0, 32.0, 64.0]
    assert list(left.lines[0].get_ydata()) == pytest.approx([1.6, 1.9, 2.2, 2.5, 2.8])
    assert list(left.lines[1].get_ydata()) == pytest.approx([1.6, 1.9, 2.2, 2.5, 2.8], abs=0.01)
    fit = law().expectation()
    assert right.lines[3].get_ydata()[-1] == pytest.approx(fit.tokens_per_step(5, 16))
    single = replace(law(), points=law().points[:1])
    assert len(scaling_figure.draw(single).axes[0].lines) == 1, "a single size is drawn without a line"


def test_figures_without_matplotlib_and_without_a_folder(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="another --out"):
        scaling_figure.save_figures(law(), tmp_path / "none")
    not_found(monkeypatch, scaling_figure)
    with pytest.raises(MissingExtraError):
        scaling_figure.save_figures(law(), tmp_path)

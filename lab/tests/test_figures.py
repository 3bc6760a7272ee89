"""Pictures: all of them, valid, the same bytes every time; what has no data is left out."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from made_results import METHODS, made_results
from matplotlib import rcParams
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from pretend import not_found

from lade.errors import MissingExtraError
from lade_lab.report import figures
from lade_lab.report.figures import save_figures
from lade_lab.report.theme import DARK, LIGHT
from lade_lab.results import Method
from lade_lab.summary import summarise

NAMES = ("speedup", "trade", "step_cost", "acceptance")
RESULTS = made_results(prompts=2, methods=[METHODS[0], METHODS[2], METHODS[5], METHODS[7]], workloads=("mt-bench",))
BARE = replace(RESULTS, samples=[replace(each, sources=[]) for each in RESULTS.samples], step_curves=[])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures") / "new" / "folder"
    return save_figures(RESULTS, folder)


@pytest.mark.slow
def test_each_picture_is_there_in_both_formats_and_drawn_twice_it_is_the_same(drawn, tmp_path):
    expected = {f"{name}.{kind}" for name in NAMES for kind in ("svg", "png")}
    assert {path.name for path in drawn} == expected == {path.name for path in drawn[0].parent.iterdir()}
    for path in drawn:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            assert ET.fromstring(path.read_text()).tag.endswith("svg")
    for first, second in zip(drawn, save_figures(RESULTS, tmp_path), strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name


def test_one_file_has_the_colours_of_light_and_of_dark_pages_and_its_text_as_text(drawn):
    svg = next(path for path in drawn if path.name == "speedup.svg").read_text()
    style = svg[svg.index("<style") : svg.index("</style>")]
    body = svg[svg.index("</style>") :]
    assert "@media (prefers-color-scheme: dark)" in style
    for light, dark in ((LIGHT.paper, DARK.paper), (LIGHT.loss, DARK.loss), (LIGHT.ink, DARK.ink)):
        assert f'[style*="fill: {light}"]{{fill:{dark}!important}}' in style
        assert f"fill: {light}" in body and dark not in body
    assert ">mt-bench</text>" in body and set(re.findall("#[0-9a-f]{6}", body)) <= set(LIGHT.colours())
    pairs = set(zip(LIGHT.colours(), DARK.colours(), strict=True))
    assert len(pairs) == len(set(LIGHT.colours())), "a colour of the light theme names one of the dark"
    assert rcParams["svg.hashsalt"] is None, "settings of matplotlib are left alone"


def test_a_loss_is_a_bar_of_another_colour_to_the_left():
    axes = Figure().subplots()
    for row in summarise(RESULTS).overall.rows[2:]:
        figures._bar(axes, 0, row)
    lost, gained = axes.patches
    assert (to_hex(lost.get_facecolor()), to_hex(gained.get_facecolor())) == (LIGHT.loss, LIGHT.gain)
    assert lost.get_width() < 0 < gained.get_width()
    assert [text.get_text()[0] for text in axes.texts] == ["▼", "2"]


def test_what_was_not_measured_is_not_drawn_or_said_to_be_so(tmp_path):
    assert {path.stem for path in save_figures(BARE, tmp_path)} == {"speedup", "trade"}
    assert save_figures(replace(BARE, samples=[]), tmp_path) == []
    some = replace(BARE, samples=[each for each in BARE.samples if each.method in ("hf", "plain")])
    assert len(save_figures(some, tmp_path)) == 4
    texts = [text.get_text() for axes in figures._speedup(some).axes for text in axes.texts]
    assert "not measured" in texts


def test_names_are_text_and_no_formulas(tmp_path):
    odd = Method("$x_{1$", "plain")
    named = [replace(each, method=odd.name) if each.method == "plain" else each for each in BARE.samples]
    assert save_figures(replace(BARE, methods=[METHODS[0], odd], samples=named), tmp_path)


def test_without_matplotlib_the_remedy_is_named(monkeypatch, tmp_path):
    not_found(monkeypatch, figures)
    with pytest.raises(MissingExtraError, match="pip install"):
        save_figures(RESULTS, tmp_path / "none")
    assert not (tmp_path / "none").exists()

"""The page: whole, safe, self-contained, and there whatever is missing from the run."""

import json
import re
import xml.etree.ElementTree as ET
from base64 import b64decode
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from made_results import METHODS, made_results

from lade_lab.report import figures
from lade_lab.report.page import FIRST, MOST_ANSWERS, page, write_report
from lade_lab.report.table import COLUMNS, named
from lade_lab.results import Method
from lade_lab.summary import summarise

RESULTS = made_results(prompts=3)
EVIL = "<script>alert('&')</script>"
HEADINGS = [
    "Figures", "Where texts part", "Speed-up by workload", "What a step costs", "Tokens per step", "What was accepted",
    "How to read it", "Every answer", "What it ran on",
]  # fmt: skip
VOID = {"meta", "link", "input", "br", "img", "hr"}
LOADS = {"src", "srcset", "poster", "background", "action", "formaction", "data"}


class Page(HTMLParser):
    """Elements with their attributes, texts, and whether tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.open = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag, **attributes):
        found = [attrs for name, attrs in self.elements if name == tag]
        return [
            attrs for attrs in found if all(attrs.get(key.strip("_")) == value for key, value in attributes.items())
        ]

    @property
    def text(self):
        return "".join(data for tag, data in self.texts if tag not in ("script", "style"))


@pytest.fixture(scope="module")
def text():
    return page(RESULTS)


@pytest.mark.slow
def test_it_parses_and_names_every_method_and_workload(text):
    found = Page(text)
    for method in METHODS:
        assert method.name in found.text
    for workload in RESULTS.workloads:
        assert workload.name in found.text
    assert len(found.all("h1")) == 1
    for heading in HEADINGS:
        assert heading in found.text
    assert "lade bench --model stories3M-hf --prompts 'my prompts/human eval.jsonl' --pack" in found.text


@pytest.mark.slow
def test_ids_are_unique_and_references_lead_somewhere(text):
    found = Page(text)
    ids = Counter(attrs["id"] for _, attrs in found.elements if "id" in attrs)
    assert [name for name, times in ids.items() if times > 1] == []
    for _, attrs in found.elements:
        assert attrs.get("aria-labelledby", "figures") in ids
        if attrs.get("href", "").startswith("#"):
            assert attrs["href"][1:] in ids
    script = text[text.rindex("<script>") :]
    assert set(re.findall(r'\$\("(\w+)"\)', script)) <= set(ids)


@pytest.mark.slow
def test_nothing_is_loaded_from_anywhere(text):
    for tag, attrs in Page(text).elements:
        for name, value in attrs.items():
            if name in LOADS or (name == "href" and tag != "a") or name.endswith("xlink:href"):
                assert value.startswith(("data:", "#")), (tag, name, value)
    style = "".join(data for tag, data in Page(text).texts if tag == "style")
    assert "url(" not in style
    assert "@import" not in style
    policy = Page(text).all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy[0]["content"].startswith("default-src 'none'")
    assert len(text) < 1_000_000


def test_every_picture_says_in_words_what_it_shows_and_is_in_the_page(text):
    pictures = Page(text).all("img")
    assert [attrs["alt"] for attrs in pictures] == list(figures.MEANINGS.values())
    for attrs in pictures:
        svg = b64decode(attrs["src"].removeprefix("data:image/svg+xml;base64,")).decode()
        assert ET.fromstring(svg).tag.endswith("svg")
    assert "Without pictures" not in text


def test_without_matplotlib_there_is_a_page_with_tables_that_names_the_remedy(monkeypatch):
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    found = Page(page(RESULTS))
    assert not found.all("img") and found.all("table")
    assert (
        "Without pictures: matplotlib is not installed: in the checkout of lade, run  pip install '.[bench]'"
        in found.text
    )


def test_faults_stand_first_then_gains_and_losses(text):
    kinds = [attrs["class"] for tag, attrs in Page(text).elements if tag == "li" and "class" in attrs]
    assert kinds[0] == "fault"
    assert kinds.index("gain") < kinds.index("loss")


def test_texts_of_others_are_escaped():
    methods = [METHODS[0], METHODS[2], Method(EVIL, "adaptive", {"note": EVIL}, packed=True)]
    found = made_results(prompts=1, workloads=("gsm8k",))
    named = [replace(each, method=EVIL, prompt=EVIL) if each.method == "adaptive" else replace(each, prompt=EVIL)
             for each in found.samples if each.method in ("hf", "plain", "adaptive")]  # fmt: skip
    evil = replace(
        found, methods=methods, samples=named, command=["lade", EVIL], workloads=found.workloads,
        model=replace(found.model, name=EVIL), environment=replace(found.environment, device=EVIL, commit=EVIL),
        mismatches=[replace(found.mismatches[0], method=EVIL, prompt=EVIL)],
    )  # fmt: skip
    html = page(evil)
    assert "<script>alert" not in html
    parsed = Page(html)
    assert len(parsed.all("script")) == 2
    assert EVIL in parsed.text
    assert json.loads(data_of(html, "summary"))["command"] == ["lade", EVIL]


def test_six_columns_are_shown_and_a_switch_that_needs_no_script_shows_the_others(text):
    heads = re.findall(r"<thead><tr>\n(.*?)</tr>", text, re.DOTALL)[0]
    names = re.findall(r'<th scope="col"(?: class="(\w+)")?[^>]*>(.*?)</th>', heads)
    assert len(FIRST) == 6 and [name for kind, name in names if not kind] == list(FIRST)
    assert [kind for kind, _ in names] == [""] * 6 + ["more"] * (len(COLUMNS) - 6)
    rows = re.findall(r'<tr class="">\n(.*?)</tr>', text, re.DOTALL)
    assert rows and all(len(re.findall(r'<td class="more', row)) == len(COLUMNS) - 6 for row in rows)
    assert "#all-columns:not(:checked) ~ * .more { display: none; }" in text
    (switch,) = Page(text).all("input", id="all-columns")
    assert switch["type"] == "checkbox" and "checked" not in switch
    assert f"All {len(COLUMNS)} columns" in Page(text).text


def test_every_column_that_does_not_say_all_is_explained(text):
    summary, shown = summarise(RESULTS), " ".join(Page(text).text.split())
    meanings = [named(column.meaning, summary) for column in COLUMNS if column.meaning]
    assert len(meanings) > 8 and all(meaning in shown for meaning in meanings)


def test_without_steps_of_one_token_there_is_nothing_to_break_even_with(text):
    assert "nothing to break even with" not in text
    alone = [each for each in RESULTS.samples if each.method in ("adaptive", "adaptive-warm")]
    assert "nothing to break even with" in page(replace(RESULTS, samples=alone))


def data_of(html, name):
    (found,) = re.findall(rf'<script type="application/json" id="{name}">(.*?)</script>', html, re.DOTALL)
    return found


def test_the_figures_are_in_the_page_as_json(text):
    data = json.loads(data_of(text, "summary"))
    assert data["summary"]["reference"] == "hf"
    assert len(data["summary"]["blocks"]) == 4
    assert "samples" not in data


def test_each_answer_has_a_row_and_losses_are_marked(text):
    body = text[text.index('class="sortable"') :]
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</tr>", body[: body.index("</table>")], re.DOTALL)
    assert len(rows) == 3 + 3 + 2 * 3
    assert any('class="loss"' in row and "▼" in row for row in rows)
    assert sum("≠" in row for row in rows) == 1
    assert sum("≈" in row for row in rows) == 1


@pytest.mark.slow
def test_very_many_answers_are_cut_and_that_is_said():
    many = [replace(RESULTS.samples[0], prompt=str(number)) for number in range(MOST_ANSWERS + 5)]
    html = page(replace(RESULTS, samples=many))
    assert f"The first {MOST_ANSWERS};" in html
    assert len(html) < 1_000_000


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "missing",
    [
        {"samples": [], "mismatches": [], "step_curves": []},
        {"samples": RESULTS.samples[:1], "complete": False},
        {"samples": [each for each in RESULTS.samples if each.method == "adaptive"]},
        {"step_curves": []},
        {"mismatches": []},
        {"workloads": [], "samples": []},
        {"environment": replace(RESULTS.environment, commit=None, versions={})},
        {"samples": [replace(each, steps=0, step_tokens=[], accepted=[], new_tokens=1, decode_s=0.0, sources=[])
                     for each in RESULTS.samples]},
        {"mismatches": [replace(RESULTS.mismatches[0], expected=None, expected_score=None, ulps=None)]},
    ],
)  # fmt: skip
def test_there_is_a_page_whatever_is_missing(missing):
    found = Page(page(replace(RESULTS, **missing)))
    assert "How to read it" in found.text
    if missing.get("samples") != []:
        assert "Figures" in found.text


@pytest.mark.slow
def test_it_is_one_file_of_utf8(tmp_path):
    write_report(RESULTS, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page(RESULTS)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_it_obeys_the_reader(text):
    for wish in ("prefers-reduced-motion", "light-dark(", "@media (max-width"):
        assert wish in text
    assert Page(text).all("html", lang="en")
    assert Page(text).all("meta", name="viewport")

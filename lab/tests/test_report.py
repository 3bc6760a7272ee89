"""The page: whole, safe, self-contained, and there whatever is missing from the run."""

import json
import re
import xml.etree.ElementTree as ET
from base64 import b64decode
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from made_results import METHODS, made_results, replay_of

from lade_lab.harness.methods import KINDS
from lade_lab.report import figures, glossary
from lade_lab.report.page import FIRST, MOST_ANSWERS, page, write_report
from lade_lab.report.table import COLUMNS, named
from lade_lab.results import Method
from lade_lab.summary import summarise

RESULTS = made_results(prompts=3)
EVIL = "<script>alert('&')</script>"
HEADINGS = [
    "Figures", "Where texts part", "Speed-up by workload", "What a step costs", "Tokens per step", "What was accepted",
    "Watch one answer", "How to read it", "Every answer", "What it ran on",
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
    assert "lade bench --model stories3M-hf --workload 'my prompts/human eval.jsonl' --pack" in found.text


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
    assert set(re.findall(r'\$\("(\w+)"\)', script)) <= set(ids) | {"which"}


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
    assert 'Without pictures: matplotlib is not installed: run  pip install "lookahead-decoding[bench]"' in found.text


def test_faults_and_losses_stand_before_gains(text):
    kinds = [attrs["class"] for tag, attrs in Page(text).elements if tag == "li" and "class" in attrs]
    assert kinds[0] == "fault"
    assert kinds.index("loss") < kinds.index("gain")


def test_texts_of_others_are_escaped():
    methods = [METHODS[0], METHODS[2], Method(EVIL, "adaptive", {"note": EVIL}, packed=True)]
    found = made_results(prompts=1, workloads=("gsm8k",))
    named = [replace(each, method=EVIL, prompt=EVIL) if each.method == "adaptive" else replace(each, prompt=EVIL)
             for each in found.samples if each.method in ("hf", "plain", "adaptive")]  # fmt: skip
    step = {"pieces": [EVIL, " tail"], "sources": [EVIL, "bonus"], "fed": 2, "seconds": 0.1}
    watched = replace(replay_of(METHODS[6], "gsm8k", EVIL), method=EVIL, steps=[step])
    evil = replace(
        found, methods=methods, samples=named, replays=[watched], command=["lade", EVIL], workloads=found.workloads,
        model=replace(found.model, name=EVIL), environment=replace(found.environment, device=EVIL, commit=EVIL),
        mismatches=[replace(found.mismatches[0], method=EVIL, prompt=EVIL)],
    )  # fmt: skip
    html = page(evil)
    assert "<script>alert" not in html
    parsed = Page(html)
    assert len(parsed.all("script")) == 3
    pieces = "".join(data for _, data in parsed.texts)
    assert EVIL + " tail" in pieces  # the text of the replay, as it was
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


def test_every_column_and_every_kind_of_method_is_explained(text):
    summary, shown = summarise(RESULTS), " ".join(Page(text).text.split())
    words = glossary.columns(summary)
    assert set(words) == {named(column.head, summary) for column in COLUMNS}
    assert glossary.KINDS.keys() == KINDS.keys()
    for sentence in [*words.values(), *(glossary.KINDS[method.kind] for method in METHODS)]:
        assert "{" not in sentence and len(sentence) > 30 and sentence in shown
    for word in ("compression ratio", "fed", "acceptance", "break-even", "spread"):
        assert re.search(rf"<dt>{word}</dt>", text)


def test_words_come_with_the_figures_of_the_run():
    entries = {entry.word: entry for entry in glossary.terms(summarise(RESULTS))}
    row = summarise(RESULTS).overall.row("adaptive")
    guesses, accepted = row.fed_per_step - 1, row.tokens_per_step - 1
    examples = {word: next(each for each in entry.examples if each.startswith("adaptive:"))
                for word, entry in entries.items() if entry.examples}  # fmt: skip
    assert (
        f"of {guesses:.1f} guesses a step, {accepted:.2f} were accepted ({accepted / guesses:.0%})"
        in examples["acceptance"]
    )
    assert examples["fed"].startswith(f"adaptive: {row.fed_per_step:.1f} tokens a step")
    cost = row.step_s / summarise(RESULTS).overall.row("plain").step_s
    assert (
        f"so {cost:.2f} tokens per step break even; it brought {row.tokens_per_step:.2f}, a gain."
        in examples["break-even"]
    )
    low, high = row.speedup.each.low, row.speedup.each.high
    assert f"the middle half of {row.samples} answers from {low:.2f} to {high:.2f}" in examples["spread"]
    assert any(each.endswith("a loss.") for each in entries["break-even"].examples)


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


def test_the_replay_has_every_step_with_its_time(text):
    timeline = json.loads(data_of(text, "timeline"))
    assert len(timeline) == 2  # plain stands beside the others, not alone
    (fastest,) = [replay for replay in RESULTS.replays if replay.method == "adaptive-warm"]
    own, beside = timeline[0]["lanes"]  # the fastest method first
    assert own == [[round(step["seconds"], 6), len(step["pieces"])] for step in fastest.steps]
    assert all(count == 1 for _, count in beside)
    steps = [attrs for tag, attrs in Page(text).elements if "data-step" in attrs]
    assert len(steps) == sum(len(lane) for show in timeline for lane in show["lanes"])
    pieces = [piece for step in fastest.steps for piece in step["pieces"]]
    assert "".join(pieces) in Page(text).text


@pytest.mark.slow
def test_a_replay_that_is_over_at_once_is_slowed_down(text):
    assert json.loads(data_of(text, "timeline"))[0]["speed"] == 0.5
    quick = [replace(each, steps=[{**step, "seconds": 0.002} for step in each.steps]) for each in RESULTS.replays]
    assert json.loads(data_of(page(replace(RESULTS, replays=quick)), "timeline"))[0]["speed"] < 0.1


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
        {"samples": [], "mismatches": [], "step_curves": [], "replays": []},
        {"samples": RESULTS.samples[:1], "complete": False},
        {"samples": [each for each in RESULTS.samples if each.method == "adaptive"]},
        {"step_curves": []},
        {"replays": []},
        {"replays": [replace(RESULTS.replays[0], steps=[])]},
        {"replays": RESULTS.replays[:1]},
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

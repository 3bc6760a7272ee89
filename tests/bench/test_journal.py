"""The journal keeps what is done, whatever ends the process."""

import json

import pytest

from lade.bench.journal import Journal
from lade.errors import InputError
from lade.lines import differences, require_same

TERMS = {"settings": {"max_new_tokens": 20, "seeds": (0, 1)}, "methods": [{"name": "hf"}, {"name": "plain"}]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


@pytest.fixture
def journal(path):
    journal = Journal.begin(path, TERMS, created="today")
    for number in range(3):
        journal.add({"job": number, "text": "é\n\u2028"})
    return journal


def test_it_goes_on_with_what_is_there(journal, path):
    again = Journal.go_on(path, TERMS)
    assert again.entries == journal.entries == [{"job": n, "text": "é\n\u2028"} for n in range(3)]
    assert again.header == journal.header and again.header["created"] == "today"
    again.add({"job": 3})
    assert [entry["job"] for entry in Journal.go_on(path, TERMS).entries] == [0, 1, 2, 3]


@pytest.mark.parametrize("torn", range(1, 40, 6))
def test_a_torn_last_line_is_dropped_and_cut_off(journal, path, torn):
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write((json.dumps({"job": 3, "samples": ["something longer"]}).encode())[:torn])
    again = Journal.go_on(path, TERMS)
    assert len(again.entries) == 3 and path.read_bytes() == whole
    again.add({"job": 3})
    assert [entry["job"] for entry in Journal.go_on(path, TERMS).entries] == [0, 1, 2, 3]


def test_each_line_is_there_as_soon_as_it_is_added(journal, path):
    lines = path.read_text().splitlines()
    assert len(lines) == 4 and json.loads(lines[3])["job"] == 2


def test_a_new_one_takes_the_place_of_an_old_one_with_its_first_line(journal, path):
    new = Journal.begin(path, TERMS)
    assert len(Journal.go_on(path, TERMS).entries) == 3, "nothing is done yet"
    new.add({"job": 7})
    assert Journal.go_on(path, TERMS).entries == [{"job": 7}]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_whole_line_that_is_no_json_is_damage(journal, path):
    path.write_bytes(path.read_bytes().replace(b'{"job":1', b'["job":1'))
    with pytest.raises(InputError, match=r"damaged at line 3.*another --out"):
        Journal.go_on(path, TERMS)
    path.write_bytes(b"[1]\n")
    with pytest.raises(InputError, match="damaged at line 1"):
        Journal.go_on(path, TERMS)


@pytest.mark.parametrize("content", [b"", b'{"schema": "other/7"}\n', b'{"schema"'])
def test_what_is_no_journal(path, content):
    path.write_bytes(content)
    with pytest.raises(InputError, match="is no journal of schema lade-bench/1"):
        Journal.go_on(path, TERMS)


def test_one_that_is_not_there(path):
    with pytest.raises(InputError, match=r"cannot be read.*without --resume"):
        Journal.go_on(path, TERMS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {**TERMS, "settings": {**TERMS["settings"], "max_new_tokens": 30}},
            "settings.max_new_tokens is 30 here, but 20",
        ),
        ({**TERMS, "settings": {**TERMS["settings"], "seeds": [0, 2]}}, "settings.seeds 2 is 2 here, but 1"),
        ({**TERMS, "methods": [{"name": "hf"}]}, "methods is .* here, but .*plain"),
        ({**TERMS, "methods": [{"name": "hf"}, {"name": "x"}]}, 'methods 2.name is "x" here, but "plain"'),
        ({**TERMS, "model": "new"}, 'model is "new" here, but null'),
        ({"settings": TERMS["settings"]}, "methods is null here, but"),
    ],
)
def test_other_terms_are_refused_by_their_first_difference(journal, path, changed, message):
    before = path.read_bytes()
    with pytest.raises(InputError, match=message):
        Journal.go_on(path, changed)
    assert path.read_bytes() == before


def test_differences():
    assert list(differences({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 1, "c": 3}, "d": [1, 2]})) == [
        ("a.c", 2, 3),
        ("d", [1], [1, 2]),
    ]
    assert list(differences({"a": [1, {"b": None}]}, {"a": [1, {"b": None}]})) == []


def test_what_two_long_texts_have_in_common_is_not_shown():
    there, here = ({"prompt": "x" * 100 + "y" * 15 + end} for end in ("old", "new"))
    with pytest.raises(InputError) as caught:
        require_same(there, here, "line 1 of 'a'")
    common = "..." + "x" * 5 + "y" * 15
    assert f'prompt is "{common}new" here, but "{common}old" in line 1 of \'a\': go on' in str(caught.value)
    require_same(there, dict(there), "here")
    with pytest.raises(InputError, match=r'^a is "xx" here, but "x" in'):
        require_same({"a": "x"}, {"a": "xx"}, "here")

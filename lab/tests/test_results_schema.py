"""The schema page tells of every method; its records are generated from the docstrings, which tell of every field."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from lade_lab import results
from lade_lab.harness.methods import KINDS
from lade_lab.harness.mismatch import NEAR_ULPS, NEAR_ULPS_OTHERWISE

TEXT = (Path(__file__).parents[2] / "docs" / "results-schema.md").read_text(encoding="utf-8")
RECORDS = [value for value in vars(results).values() if is_dataclass(value)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_the_docstring_of_a_record_tells_of_every_field_that_is_no_record(record):
    attributes = record.__doc__.partition("Attributes:\n")[2]
    named = {name for names in re.findall(r"^        ((?:\w+, )*\w+):", attributes, re.M) for name in names.split(", ")}
    plain = {each.name for each in fields(record) if not any(other.__name__ in str(each.type) for other in RECORDS)}
    assert plain <= named <= {each.name for each in fields(record)}


def test_the_page_has_the_records_and_every_kind_of_method_and_the_limits_of_near_ties():
    assert "::: lade_lab.results" in TEXT and "`schema`" in TEXT
    section = TEXT.split("\n## Methods\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE) == list(KINDS)
    told = " ".join(results.Mismatch.__doc__.split())
    most = max(NEAR_ULPS.values())
    assert f"at most {most:g} units in bfloat16 and float16, {NEAR_ULPS_OTHERWISE:g} in float32" in told

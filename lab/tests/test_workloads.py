"""Workloads: files of every format become prompts, and what is wrong with a file is said with place and remedy."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from lade.embedded import model_path
from lade.errors import InputError
from lade_lab import results
from lade_lab.workloads import Item, distinct_ngrams, load
from training.corpus import HELD_OUT
from training.evaluate import load as load_model

# One entry of each format with all the keys that the public files have, in words of our own.
TALK = {"question_id": 81, "category": "writing", "turns": ["Write a note.", "Shorten it."], "reference": ["A note."]}
RAG = {"question_id": 481, "category": "rag", "turns": ["Read this, and say when."]}
HUMANEVAL = {
    "task_id": "HumanEval/0", "prompt": "def one():\n", "entry_point": "one", "canonical_solution": "    return 1\n",
    "test": "assert one() == 1",
}  # fmt: skip
MBPP = {
    "task_id": 11, "text": "Write a function that doubles.", "code": "def double(x):\r\n    return 2 * x",
    "test_setup_code": "", "test_list": ["assert double(1) == 2", "assert double(2) == 4"], "challenge_test_list": [],
}  # fmt: skip
SANITIZED = {
    "task_id": 12, "source_file": "x.ipynb", "prompt": "Write a function that halves.",
    "code": "def half(x):\n    return x / 2", "test_imports": [], "test_list": ["assert half(2) == 1"],
}  # fmt: skip
GSM8K = {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
CLASSEVAL = {
    "task_id": "ClassEval_0", "skeleton": 'class Door:\n    def open(self):\n        """Open it."""\n', "test": "",
    "solution_code": "", "import_statement": [], "class_description": "A door.", "methods_info": [],
    "class_name": "Door", "test_classes": [], "class_constructor": "class Door:", "fields": [],
}  # fmt: skip
OWN = {"id": "a", "prompt": "Once upon"}
ASKED = "You are an expert Python programmer, and here is your task:"


def written(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in entries), encoding="utf-8")
    return path


def refused(source, *words: str, **arguments) -> None:
    with pytest.raises(InputError) as caught:
        load(source, **arguments)
    message = str(caught.value)
    assert all(word in message for word in words), message


# What each format becomes


@pytest.mark.parametrize(
    ("format", "entry", "item"),
    [
        ("mt-bench", TALK, Item("81", ["Write a note.", "Shorten it."], True, category="writing")),
        ("spec-bench", RAG, Item("481", ["Read this, and say when."], True, category="rag")),
        ("humaneval", HUMANEVAL, Item("HumanEval/0", ["def one():\n"], False)),
        ("gsm8k", GSM8K, Item("1", ["Two and two?"], True, plain=["Question: Two and two?\nAnswer:"])),
        ("jsonl", OWN, Item("a", ["Once upon"], True)),
        ("jsonl", {"prompt": "Once", "category": "story"}, Item("1", ["Once"], True, category="story")),
        ("jsonl", {"id": 7, "prompt": "User: hi\nBot:", "turns": ["hi"]}, Item("7", ["User: hi\nBot:"], True)),
    ],
)
def test_a_format_is_recognised_and_read(tmp_path, format, entry, item):
    workload = load(written(tmp_path / "some.jsonl", entry))
    assert workload.record.format == format
    assert workload.items == [item]


def test_raw_prompts_are_continued_as_they_are(tmp_path):
    workload = load(written(tmp_path / "some.jsonl", OWN), raw=True)
    assert workload.record.name == "some (raw)" and [item.chat for item in workload.items] == [False]
    (asked,) = load(written(tmp_path / "test.jsonl", GSM8K), raw=True).items
    assert asked.worded(template=False) == ["Question: Two and two?\nAnswer:"]


@pytest.mark.parametrize(
    ("entry", "task", "tests"),
    [
        (MBPP, "Write a function that doubles.", "assert double(1) == 2\nassert double(2) == 4"),
        (SANITIZED, "Write a function that halves.", "assert half(2) == 1"),
    ],
)
def test_mbpp_asks_as_its_paper_does_without_examples(tmp_path, entry, task, tests):
    workload = load(written(tmp_path / "mbpp.jsonl", entry))
    (item,) = workload.items
    message = f"{ASKED} {task} Your code should pass these tests:\n\n{tests}\n"
    assert workload.record.format == "mbpp" and item.id == str(entry["task_id"]) and item.chat
    assert item.worded(template=True) == [message]
    assert item.worded(template=False) == [message + "[BEGIN]\n"]


def test_classeval_asks_for_the_class_or_continues_its_skeleton(tmp_path):
    path = tmp_path / "ClassEval_data.json"
    path.write_text(json.dumps([CLASSEVAL, {**CLASSEVAL, "task_id": "ClassEval_1"}], indent=2))
    workload = load(path)
    assert workload.record.format == "classeval" and all(item.chat for item in workload.items)
    assert [item.id for item in workload.items] == ["ClassEval_0", "ClassEval_1"]
    skeleton = CLASSEVAL["skeleton"]
    assert workload.items[0].worded(True) == [f"Please complete the class Door in the following code.\n{skeleton}"]
    assert workload.items[0].worded(False) == [skeleton]


def test_talk_beside_other_tasks_is_spec_bench_and_each_task_can_be_chosen(tmp_path):
    other = {"question_id": 82, "category": "math", "turns": ["Add.", "Subtract."]}
    path = written(tmp_path / "question.jsonl", TALK, RAG, other)
    whole = load(path)
    assert whole.record.format == whole.record.name == "spec-bench", "its file is called question.jsonl"
    assert [item.category for item in whole.items] == ["writing", "rag", "math"]
    rag = load(f"{path}#rag")
    assert [item.id for item in rag.items] == ["481"]
    assert rag.record == results.Workload("spec-bench#rag", "spec-bench", 1, whole.record.sha256)
    assert [item.id for item in load(f"{path}#mt_bench").items] == ["81", "82"]
    assert [item.id for item in load(f"{path}#math").items] == ["82"]
    refused(f"{path}#sums", "'sums'", "give one of math, mt_bench, rag, writing")
    refused(f"{written(tmp_path / 'g.jsonl', GSM8K)}#math", "'math'", "leave #... away")


def test_a_given_format_overrides_the_recognised_one_and_settles_what_fits_none_or_several(tmp_path):
    path = written(tmp_path / "some.jsonl", HUMANEVAL)
    assert load(path, format="jsonl").record == results.Workload("some", "jsonl", 1, load(path).record.sha256)
    assert load(path, format="jsonl").items == [Item("1", ["def one():\n"], True)]
    talk = written(tmp_path / "question.jsonl", TALK)
    assert load(talk, format="spec-bench").record.name == "spec-bench"
    assert load(talk).record.name == "mt-bench"
    path = written(tmp_path / "none.jsonl", {"input": "a"})
    refused(path, "'input'", "matches no known format", "jsonl: prompt")
    path = written(tmp_path / "both.jsonl", {**GSM8K, **OWN})
    refused(path, "fits gsm8k and jsonl", "say which")
    assert load(path, format="gsm8k").items[0].turns == ["Two and two?"]
    assert load(path, format="jsonl").items[0].turns == ["Once upon"]


@pytest.mark.parametrize(
    ("file", "entry", "name"),
    [
        ("HumanEval.jsonl", HUMANEVAL, "humaneval"),
        ("mbpp.jsonl", MBPP, "mbpp"),
        ("sanitized-mbpp.json", SANITIZED, "mbpp-sanitized-mbpp"),
        ("test.jsonl", GSM8K, "gsm8k"),
        ("train.jsonl", GSM8K, "gsm8k-train"),
        ("ClassEval_data.json", CLASSEVAL, "classeval"),
        ("question.jsonl", OWN, "question"),
    ],
)
def test_files_of_one_benchmark_can_be_told_apart_by_name(tmp_path, file, entry, name):
    assert load(written(tmp_path / file, entry)).record.name == name


def test_the_record_names_the_bytes_of_the_file_also_of_a_gzipped_one_and_the_prompts_run(tmp_path):
    path = written(tmp_path / "my.prompts.jsonl", *({"prompt": f"{i}"} for i in range(5)))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert load(path).record == results.Workload("my.prompts", "jsonl", 5, sha256)
    assert load(str(path), limit=3).record == results.Workload("my.prompts", "jsonl", 3, sha256)
    assert [item.turns for item in load(path, limit=3).items] == [["0"], ["1"], ["2"]]
    assert load(path, limit=9).record.prompts == 5
    path = written(tmp_path / "HumanEval.jsonl", HUMANEVAL)
    packed = tmp_path / "HumanEval.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert load(packed).items == load(path).items
    assert load(packed).record.sha256 == hashlib.sha256(packed.read_bytes()).hexdigest()


def test_blank_lines_and_a_byte_order_mark_do_not_matter_and_only_line_feeds_end_a_line(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b\\r"}\r\n')
    assert [(item.id, item.turns) for item in load(path).items] == [("1", ["a"]), ("3", ["b\r"])]
    path.write_text('{"prompt": "one\u2028paragraph\x85 or two"}\n', encoding="utf-8")
    assert load(path).items[0].turns == ["one\u2028paragraph\x85 or two"]


def test_a_number_sign_may_be_part_of_a_name_and_builtin_is_the_builtin_one_only_as_a_word(tmp_path, monkeypatch):
    path = written(tmp_path / "take#2.jsonl", {"prompt": "a", "category": "x"}, {"prompt": "b", "category": "y"})
    assert load(path).record.name == "take#2"
    assert [item.id for item in load(f"{path}#y").items] == ["2"]
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "builtin", OWN)
    assert load("builtin").record.format == "builtin"
    assert load("./builtin").items == load(Path("builtin")).items == [Item("a", ["Once upon"], True)]


# What is wrong


def test_what_cannot_be_read_is_said(tmp_path):
    refused(tmp_path / "none.jsonl", "none.jsonl", "does not exist", "give the path")
    refused(tmp_path, "is a folder", "give a file")
    refused("a\0b", "cannot be read", "check path")
    (tmp_path / "empty.jsonl").write_text(" \n\n")
    refused(tmp_path / "empty.jsonl", "empty.jsonl", "is empty", "one JSON object a line")
    (tmp_path / "empty.json").write_text("[]")
    refused(tmp_path / "empty.json", "is empty")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    refused(tmp_path / "latin.jsonl", "not UTF-8 at byte 12", "save it as UTF-8")
    (tmp_path / "x.jsonl.gz").write_bytes(b"no gzip")
    refused(tmp_path / "x.jsonl.gz", "not a complete gzip file", "download it again")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}')[:-9])
    refused(tmp_path / "cut.jsonl.gz", "not a complete gzip file")


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ("{oops", ["is not JSON", "one JSON object a line"]),
        ("[" * 100_000, ["is not JSON"]),
        ('"a text"', ["is a text", "give a JSON object"]),
        ("null", ["is null", "give a JSON object"]),
        ('{"id": "b"}', ["no 'prompt'", "only 'id'", "add it as a text"]),
        ("{}", ["no 'prompt'", "no keys"]),
        ('{"prompt": 3}', ["'prompt' is a number", "give a text"]),
        ('{"prompt": ["a"]}', ["'prompt' is a list"]),
        ('{"prompt": ""}', ["'prompt' is empty", "at least one character"]),
        ('{"prompt": "a\\ud800"}', ["'prompt' is not valid Unicode at character 1"]),
        ('{"prompt": "a", "id": 1.5}', ["'id' is a number", "a text or a whole number"]),
        ('{"prompt": "a", "id": true}', ["'id' is true or false"]),
        ('{"prompt": "b", "id": "a"}', ["the id 'a' of", "line 1", "give each its own"]),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_a_remedy(tmp_path, second, words):
    path = tmp_path / "my.jsonl"
    path.write_text(f"{json.dumps(OWN)}\n\n{second}\n", encoding="utf-8")
    refused(path, "my.jsonl' line 3", *words)
    refused(path, "my.jsonl' line 3", *words, limit=1)


@pytest.mark.parametrize(
    ("entry", "key", "value", "words"),
    [
        (TALK, "turns", [], ["'turns' is an empty list", "at least one text"]),
        (TALK, "turns", "hi", ["'turns' is a text", "a list of at least one text"]),
        (TALK, "turns", ["hi", None], ["'turns'[1] is null"]),
        (TALK, "question_id", {}, ["'question_id' is an object"]),
        (TALK, "category", 1, ["'category' is a number"]),
        (TALK, "category", ["writing"], ["'category' is a list"]),
        (HUMANEVAL, "prompt", None, ["'prompt' is null"]),
        (MBPP, "test_list", [1], ["'test_list'[0] is a number"]),
        (GSM8K, "question", "", ["'question' is empty"]),
        (CLASSEVAL, "class_name", 0, ["'class_name' is a number"]),
    ],
)
def test_a_wrong_value_is_named_with_its_key(tmp_path, entry, key, value, words):
    refused(written(tmp_path / "f.jsonl", {**entry, key: value}), "f.jsonl' line 1", *words)


def test_an_item_of_an_array_is_named_by_its_number(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([OWN, {"id": "b"}]))
    refused(path, "data.json' item 2", "no 'prompt'")
    path.write_text('[{"prompt": "a"}')
    refused(path, "not a JSON array", "fix it")


def test_arguments_out_of_range_are_refused_before_the_file_is_read():
    refused("none.jsonl", "format='csv'", "jsonl", format="csv")
    refused("none.jsonl", "limit=0", "at least 1", limit=0)
    refused("builtin", "limit=-1", limit=-1)
    refused("builtin", "is for files", format="jsonl")


# What is built in


def test_the_built_in_prompts_are_two_beginnings_from_each_held_out_module():
    """Each ends in the middle of a function: with a line for its body it is one, without it is none."""
    workload, (_, tokenizer) = load("builtin"), load_model(model_path())
    assert workload.record == results.Workload("builtin", "builtin", 16, None)
    assert [item.category for item in workload.items] == [module for module in HELD_OUT for _ in range(2)]
    for item in workload.items:
        (prompt,) = item.turns
        assert item.id.startswith(f"{item.category}.") and not item.chat
        assert f"def {item.id.rpartition('.')[2]}(" in prompt
        assert prompt == prompt.rstrip() and prompt.startswith(("def ", "class "))
        assert len(tokenizer(prompt)["input_ids"]) <= 351, "it leaves room in the embedded model"
        indent = " " * (len(prompt.split("\n")[-1]) - len(prompt.split("\n")[-1].lstrip()))
        body = f"\n{indent}{'    ' * prompt.endswith(':')}pass"
        compile(prompt + body, item.id, "exec")
    workload = load("builtin#heapq", limit=1)
    assert workload.record == results.Workload("builtin#heapq", "builtin", 1, None)
    refused("builtin#queue", "'queue'", "heapq")


def test_distinct_ngrams():
    assert distinct_ngrams([1, 2, 3]) == 1.0
    assert distinct_ngrams([7] * 7) == 0.25
    assert distinct_ngrams(range(20)) == 1.0

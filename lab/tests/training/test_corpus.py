import pytest

from lade.errors import InputError
from training.cleaning import clean, is_prose_or_code
from training.corpus import (
    HELD_OUT,
    held_out_documents,
    is_held_out,
    question_documents,
    standard_library,
    training_documents,
)


def test_training_documents_come_in_one_order_without_held_out_modules_and_copies_and_tests_less_often(root):
    names = [d.name for d in training_documents(root)]
    assert names == ["pkg/a.py", "queue.py", "test/test_queue.py"]
    assert training_documents(root) == training_documents(root)
    assert not any(is_held_out(d.name) for d in training_documents(root))
    assert [d.name for d in held_out_documents(root)] == ["heapq.py"]
    assert [d.name for d in held_out_documents(root, tests=True)] == ["test/test_heapq.py"]
    repeats = {d.name: d.repeats for d in training_documents(root)}
    assert repeats["queue.py"] > repeats["test/test_queue.py"] == 1
    (root / "rqueue.py").write_text((root / "queue.py").read_text(), encoding="utf-8")
    (root / "broken.py").write_bytes(b"# caf\xe9\n" * 100)
    assert [d.name for d in training_documents(root)] == names, "neither a copy nor what is not in its encoding"


def test_every_held_out_module_is_in_the_standard_library():
    assert [name for name in HELD_OUT if not (standard_library() / f"{name}.py").is_file()] == []


def test_cleaning_drops_licence_tabs_and_tails_of_tables_and_what_is_not_worth_reading():
    table = "".join(f"    {n}: 'entry',\n" for n in range(50))
    cleaned = clean(f"# Copyright 1999 by nobody\r\n# at all\r\n\r\nif x:\r\n\ty = 1  \r\nT = {{\n{table}}}\n")
    assert cleaned.startswith("if x:\n        y = 1\nT = {\n    0: 'entry',\n")
    assert cleaned.endswith("}\n")
    assert cleaned.count("entry") == 6
    assert not is_prose_or_code("x = 1\n")
    assert not is_prose_or_code("self.assertEqual(f(1), 2)\n" * 100)
    assert not is_prose_or_code("".join(chr(0x400 + n % 200) for n in range(1000)))


def test_question_files_become_one_document_per_line_and_missing_ones_and_an_empty_root_are_refused(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "1+1?", "answer": "2"}\n\n{"question": "2+2?", "answer": "4"}\n', encoding="utf-8")
    assert [d.text for d in question_documents(path)] == ["Question: 1+1?\nAnswer: 2\n", "Question: 2+2?\nAnswer: 4\n"]
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read"):
        question_documents(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="no Python source"):
        training_documents(tmp_path)


@pytest.mark.parametrize("line", ["not json", '{"question": "1+1?"}', "[1, 2]"])
def test_a_bad_question_line_is_named_with_its_number(tmp_path, line):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "1+1?", "answer": "2"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"q\.jsonl, line 2: .*question"):
        question_documents(path)

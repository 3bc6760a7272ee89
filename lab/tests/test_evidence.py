"""Programs of `lab/experiments`, above all those behind docs/evidence.md: wrong is counted, and runs go on."""

import json
import random
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from bench_toys import EXPERIMENTS, experiment
from mtp_toys import needs_mtp
from pretend import no_warm_up
from transformers import AutoModelForCausalLM, AutoTokenizer

from lade.embedded import model_path
from lade.testing import toy_model
from lade_lab.served import Reply

SCHEMAS = [
    {"id": "a", "schema": {"type": "object", "properties": {"x": {"enum": ["yes", "no"]}}, "required": ["x"]}},
    {"id": "b", "schema": {"type": "string", "maxLength": 3}},
    {"id": "refused", "schema": {"not": {"type": "string"}}},
]


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_imports_and_says_how_it_is_called(path, monkeypatch):
    if path.stem == "write_gguf":
        pytest.importorskip("gguf")
    assert f"python lab/experiments/{path.name}" in experiment(monkeypatch, path.stem).__doc__


def embedded(dtype):
    """The embedded model, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(model_path())


@pytest.fixture
def structured(monkeypatch):
    """With few users."""
    found = experiment(monkeypatch, "structured")
    monkeypatch.setattr(found, "USERS", 8)
    return found


@pytest.fixture
def ledger(monkeypatch):
    """With short texts."""
    found = experiment(monkeypatch, "ledger")
    monkeypatch.setattr(found, "TOKENS", 12)
    return found


@pytest.fixture
def quick(monkeypatch):
    """Servers do not warm up first."""
    no_warm_up(monkeypatch)


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (Reply(text='{"x":"no"}', tokens=[1, 2], finish="stop"), (False, False)),
        (Reply(text='{"x":"no"}', tokens=[1, 3], finish="stop"), (False, True)),
        (Reply(text='{"x":"maybe"}', tokens=[1, 2], finish="stop"), (True, True)),
        (Reply(text='{"x', tokens=[1, 2], finish="stop"), (True, True)),
        (Reply(text='{"x":"no"}', tokens=[1, 2], finish="length"), (False, False)),
        (Reply(error="busy"), (False, False)),
    ],
)
def test_answers_are_judged_by_schema_and_by_plain_decoding(structured, reply, found):
    plain = Reply(text='{"x":"no"}', tokens=[1, 2], finish="stop")
    verdict = structured.judged(SCHEMAS[0]["schema"], plain, reply)
    assert (verdict["invalid"], verdict["different"]) == found and verdict["refused"] == reply.error


def test_schemas_are_asked_for_in_every_situation_and_a_run_goes_on(structured, quick, tmp_path):
    out, (model, tokenizer) = tmp_path / "answers.jsonl", embedded(torch.float64)
    settings = structured.Settings(max_rows=4, max_waiting=64, prefix_cache=2**26)
    plain = structured.Plain(model, tokenizer, 12)
    with structured.server(structured.ServedModel(model, tokenizer, context=1024), settings) as url:
        structured.run_schemas(url, plain, SCHEMAS[::2], 12, out, 1e18)
        first = structured.lines(out)
        structured.run_schemas(url, plain, SCHEMAS, 12, out, 1e18)
    records = structured.lines(out)
    assert records[: len(first)] == first and len(records) == 2 * (2 * len(structured.CELLS) + 1)
    rows = structured.summary(records)
    assert all(row["answered"] == row["asked"] == 2 for row in rows)
    assert all(row["invalid"] == row["different"] == 0 for row in rows)
    assert {row["reused"] for row in rows if row["situation"] == "prefix reused"} != {0}
    ((refusal, twice),) = [(row["refused by"], row["times"]) for row in structured.refusals(records)]
    assert (refusal, twice) == ("both", 2)


def test_descriptions_of_functions_become_schemas(structured):
    given = {"type": "dict", "properties": {"at": {"type": "tuple", "items": {"type": "float"}, "default": []},
             "any": {"type": "any"}}, "required": ["at"]}  # fmt: skip
    made = {"type": "array", "items": {"type": "number"}}
    assert structured.converted(given) == {"type": "object", "properties": {"at": made, "any": {}}, "required": ["at"]}


def test_forced_calls_are_counted(structured, quick, tmp_path, monkeypatch):
    parameters = {"type": "dict", "properties": {"up": {"type": "boolean"}}, "required": ["up"]}
    function = {"name": "math.add", "parameters": parameters}
    line = {"question": [[{"role": "user", "content": "go"}]], "function": [function]}
    (tmp_path / "BFCL_v4_simple_python.json").write_text(json.dumps(line) + "\n")
    model, tokenizer = embedded(torch.float64)
    tokenizer.chat_template = structured.TOOLS
    served = structured.ServedModel(model, tokenizer, context=1024)
    with structured.server(served, structured.Settings(max_rows=2)) as url:
        counts = structured.run_calls(url, tmp_path, 5, 60, 1e18)
    assert counts["asked"] == counts["calls"] == counts["ended by tool_calls"] == 1
    assert counts["arguments that do not fit"] == 0 and "arguments that do not parse" not in counts


def test_the_ledger_counts_from_the_first_difference_on_and_takes_what_has_fewest_tokens_or_least_time(ledger):
    assert ledger.differing([([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [1, 9, 3]), ([1, 2, 3], [1])]) == 4
    models = [ledger.Subject(name, "float64", toy_model("llama"), None, ExitStack()) for name in "ab"]
    piece = {"path": "greedy", "dtype": "float64", "tokens": 128}
    known = [{**piece, "model": "a", "seconds": 2.0}, {**piece, "model": "b", "seconds": 1.0}]
    wide = {**piece, "path": "batch", "model": "a", "tokens": 300 * ledger.SHARE["batch"], "seconds": 3.0}
    paths = ["greedy", "batch"]
    assert ledger.behind([*known, wide], paths, models) == ("greedy", models[1], 1)
    assert ledger.behind([*known, known[0], wide], paths, models) == ("batch", models[1], 0)
    assert ledger.until([5, 1, 0, 0], 1) == [5, 1] and ledger.until([5, 1, 0], None) == [5, 1, 0]


def test_the_ledger_goes_on_behind_its_end_and_notices_what_differs(ledger, quick, tmp_path, monkeypatch):
    toy = ledger.Subject("toy", "float64", toy_model("llama"), None, ExitStack())
    monkeypatch.setattr(ledger, "subjects", lambda models, prompts, stack: [toy])
    out = tmp_path / "ledger.jsonl"
    alone = [path for path in ledger.PATHS if ledger.applies(path, toy)]
    assert set(ledger.PATHS) - set(alone) == {"server", "grammar", "MTP", "several processes"}
    with toy.stack:
        ledger.run(out, alone, pieces=len(alone))
        ledger.run(out, ["greedy"], pieces=2)
        wrong = ledger.PATHS["greedy"](toy, random.Random(0))
    pieces = ledger.records(out)
    assert len(pieces) == len(alone) + 2 and [p["seed"] for p in pieces if p["path"] == "greedy"] == [0, 1, 2]
    total = ledger.summary(pieces)[-1]
    assert total["different"] == 0 and total["tokens"] == 12 * total["texts"]
    monkeypatch.setitem(ledger.PATHS, "greedy", lambda s, rng: [(wrong[0][0], [*wrong[0][0][:-2], 0, 1])])
    ledger.run(out, ["greedy"], pieces=1)
    assert ledger.summary(ledger.records(out))[-1]["different"] > 0


def test_the_ledger_asks_a_given_model_the_questions_of_a_file(ledger, tmp_path):
    questions = tmp_path / "question.jsonl"
    questions.write_text(json.dumps({"prompt": "def f(x):"}) + "\n")
    with ExitStack() as stack:
        (subject,) = ledger.subjects([str(model_path())], questions, stack)
        assert (subject.name, subject.dtype) == (model_path().name, "float32")
        assert subject.tokenizer.decode(subject.prompt(random.Random(0)), skip_special_tokens=True) == "def f(x):"


@needs_mtp
def test_the_ledger_compares_a_trained_model_with_its_layer(ledger, quick):
    with ExitStack() as stack:
        trained = ledger.Subject("embedded", "float32", *embedded(torch.float32), stack)
        assert ledger.applies("MTP", trained)
        for path, seed in (("MTP", 0), ("MTP", 1), ("grammar", 0), ("grammar", 2), ("server", 0)):
            pairs = ledger.PATHS[path](trained, random.Random(seed))
            assert pairs and all(plain and plain == own for plain, own in pairs), path


def test_recorded_answers_are_decoded_by_a_server(quick, monkeypatch):
    agents = experiment(monkeypatch, "agents")
    call = {"function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [
        {"role": "system", "content": "Look first."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "nothing there"},
        {"role": "assistant", "content": "nothing there at all", "tool_calls": [call]},
    ]
    model, tokenizer = agents.without_end(str(model_path()), 2**17), AutoTokenizer.from_pretrained(model_path())
    first, second = agents.by_server(16, [messages], model, tokenizer)
    assert (first.number, second.number) == (1, 2) and first.cached_tokens == 0 < second.cached_tokens
    assert second.prompt_tokens > first.prompt_tokens and 1 <= second.stats.steps < second.stats.new_tokens
    assert agents.summary([first, second])["tokens"] == first.stats.new_tokens + second.stats.new_tokens


def test_other_servers_are_compared_with_themselves(monkeypatch):
    peers = experiment(monkeypatch, "structured_peers")
    fields = {"server": "vLLM", "temperature": 0.0, "id": "a", "ended": True, "valid": True, "accepted": 0}
    records = [
        {**fields, "speculation": "none", "users": 1, "tokens": [1, 2, 3, 4]},
        {**fields, "speculation": "ngram", "users": 8, "tokens": [1, 2, 3, 4], "accepted": 2.0},
        {**fields, "speculation": "ngram", "users": 8, "tokens": [1, 9, 3, 4], "valid": False},
        {**fields, "speculation": "ngram", "users": 8, "tokens": [1], "id": "b", "ended": False},
        {"server": "vLLM", "speculation": "ngram", "temperature": 0.0, "users": 8, "id": "c", "refused": "no"},
    ]
    plain, ngram = peers.summary(records)
    assert (plain["different"], plain["invalid"], plain["tokens per step"]) == (0, 0, 1.0)
    assert (ngram["asked"], ngram["answered"], ngram["ended"]) == (4, 3, 2)
    assert (ngram["compared"], ngram["different"], ngram["invalid"]) == (2, 1, 1)
    assert ngram["tokens per step"] == 9 / 7 and not peers.misfit('{"x": "no"}', SCHEMAS[0]["schema"])
    assert peers.message_of('{"error": {"message": "no"}}') == "no" and peers.message_of("busy") == "busy"
    assert peers.misfit("{", SCHEMAS[0]["schema"]) and peers.misfit("3", SCHEMAS[0]["schema"])


def test_weights_of_a_gguf_file_pair_what_is_rotated_together(monkeypatch):
    pytest.importorskip("gguf")
    write_gguf = experiment(monkeypatch, "write_gguf")
    config = type("Config", (), {"num_attention_heads": 2, "num_key_value_heads": 1})
    rows = torch.arange(8.0)[:, None]
    pairs = write_gguf.paired("layers.0.self_attn.q_proj.weight", rows, config)[:, 0].tolist()
    assert pairs == [0, 2, 1, 3, 4, 6, 5, 7]
    assert write_gguf.paired("layers.0.mlp.up_proj.weight", rows, config) is rows


def test_tables_of_the_page_are_made_of_results(monkeypatch, tmp_path):
    evidence = experiment(monkeypatch, "evidence")
    page = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()
    assert all(f"<!-- table: {name} -->\n\n|" in page for name in evidence.TABLES)
    piece = {"path": "greedy", "model": "toy", "dtype": "float64", "texts": 1, "tokens": 1280, "different": 3}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(piece) + "\n")
    (tmp_path / "calls.json").write_text(json.dumps({"asked": 4, "calls": 3, "refused: N tokens": 1}))
    made = evidence.renewed(page, tmp_path)
    assert "| greedy | toy float64 | 1 | 1,280 | 3 |\n| all |  | 1 | 1,280 | 3 |\n\n" in made
    assert "| refused: the prompt is too long for the model | 1 |" in made
    assert evidence.renewed(made, tmp_path) == made and made.count("<!--") == page.count("<!--")
    with pytest.raises(ValueError, match="no place for 'ledger'"):
        evidence.renewed("", tmp_path)


def test_a_copy_of_the_ledger_writes_the_text_of_its_model(ledger):
    model, _ = embedded(torch.bfloat16)
    subject = ledger.Subject("embedded", "bfloat16", ledger.promised(model), None, ExitStack())
    copied = ledger.reloaded(subject)
    own, other = dict(model.named_buffers()), dict(copied.named_buffers())
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
    assert all(own[name].dtype == other[name].dtype for name in own)
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, copied(ids).logits)

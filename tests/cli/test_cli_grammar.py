"""`--json-schema`, `--regex` and `--grammar` of `lade generate`."""

import json
import re

import pytest
import torch

import lade as library

PROMPT = "say it again, say it"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["one", "two"]}, "size": {"const": 3}},
    "required": ["name"],
}
LARK = 'start: "(" start ")" | "x"'


KINDS = {
    "json-schema": (json.dumps(SCHEMA), library.Grammar.json_schema(SCHEMA)),
    "grammar": (LARK, library.Grammar.lark(LARK)),
    "regex": ("[ab]{3}c", library.Grammar.regex("[ab]{3}c")),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_follow_it(report, folder, model, tokenizer, tmp_path, kind):
    source, grammar = KINDS[kind]
    (tmp_path / "source").write_text(source)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    more = {"max_new_tokens": 40, "logits_processor": [grammar.processor(tokenizer)]}
    plain = model.generate(ids, **more)[0, ids.shape[1] :].tolist()
    given = [f"--{kind}", source if kind == "regex" else tmp_path / "source", "--max-new-tokens", 40, "--budget", 8]
    assert report("generate", "--model", folder, "--prompt", PROMPT, *given)["token_ids"] == plain


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--json-schema", "nowhere.json"], "JSON schema file 'nowhere.json' cannot be read"),
        (["--regex", "a", "--grammar", "x.lark"], "--regex"),
        (["--regex", "(?=a)b"], "--regex '(?=a)b': the grammar cannot be used: "),
        (["--regex", "(?=a)b"], "look-ahead"),
        (["--regex", ""], "empty"),
        (["--grammar", "none.lark"], "--grammar none.lark: the grammar cannot be used: "),
        (["--json-schema", "none.json"], "--json-schema none.json: the schema cannot be used: "),
        (["--json-schema", "never.json"], "--json-schema never.json: the grammar cannot be used: "),
    ],
)
def test_what_is_none_is_refused(lade, folder, more, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"none.lark": "start: other", "none.json": "{", "never.json": '{"type": "never"}'}.items():
        (tmp_path / name).write_text(text)
    result = lade("generate", "--model", folder, "--prompt", PROMPT, *more)
    assert result.exit_code == 2 and says in re.sub(r"\s+", " ", result.stderr), result.stderr

"""What a prompt is: a text from anywhere, or a conversation in the model's chat template; and how its answer ends."""

import json

import pytest
import torch
from shell_fixtures import SHORT, press_ctrl_c, saved, word_tokenizer
from test_cli_errors import fails
from transformers import LlamaConfig, LlamaForCausalLM

from lade import Memory
from lade.decoding.kernels.layout import ORDERS
from lade.hf.detokenizer import Detokenizer

PROMPT = "say it again, say it"
NEW = 16
TERMINAL = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": "1"}


@pytest.fixture
def generate(lade, folder):
    def run(*arguments, model=folder, new=NEW, **given):
        return lade("generate", "-m", model, "-n", new, *arguments, **given)

    return run


def report(result):
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


# Where prompts come from


def test_an_argument_a_pipe_and_an_option_are_the_same(generate):
    expected = generate("--prompt", PROMPT).stdout
    assert generate(PROMPT).stdout == expected
    assert generate(PROMPT, stdin="something else").stdout == expected, "which whatever starts this may have"
    assert generate(stdin=PROMPT + "\n").stdout == generate("-", stdin=PROMPT + "\n").stdout == expected
    assert generate("--", "--prompt").stdout == generate("--prompt=--prompt").stdout != expected


# The text of an answer


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """A model whose words carry their space."""
    tokenizer = word_tokenizer()
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data[0] = 0.0
    return saved(model, tmp_path_factory, "words", tokenizer), tokenizer


def test_a_text_continues_its_prompt_with_a_space_behind_special_tokens_too(generate, sentencepiece, prompt_lines):
    model, tokenizer = sentencepiece
    ids = report(generate("the cat", "--json", model=model))["token_ids"]
    text = tokenizer.decode([*tokenizer("the cat")["input_ids"], *ids]).removeprefix("the cat")
    assert text.startswith(" ") and not tokenizer.decode(ids).startswith(" ")
    assert report(generate("the cat", "--json", model=model))["text"] == text
    assert generate("the cat", model=model).stdout == text + "\n"
    assert report(generate("--prompts", prompt_lines("the cat"), "--json", model=model))["text"] == text
    assert Detokenizer(tokenizer, [1, *[0] * 20]).whole([2, 3]) == " cat sat"
    assert Detokenizer(tokenizer, [0] * 20).whole([2, 3]) == "cat sat", "nothing stands before it"


# Chat templates


def templated_text(*turns, system=None):
    """What the template of conftest.py makes of a conversation."""
    before = "" if system is None else f"<system>{system}|"
    return before + "".join(f"<{role}>{text}|" for role, text in turns) + "<assistant>"


def test_a_model_with_a_chat_template_answers(generate, templated, plain, tokenizer):
    ids = report(generate("hello", "--json", model=templated))["token_ids"]
    assert ids == plain(tokenizer(templated_text(("user", "hello")))["input_ids"], NEW)
    raw = report(generate("hello", "--raw", "--json", model=templated))["token_ids"]
    assert raw == plain(tokenizer("hello")["input_ids"], NEW) != ids
    assert report(generate("hello", "--raw", "--json"))["token_ids"] == raw, "a model without one has nothing to leave"


def test_a_system_message_comes_first_and_conversations_are_lines(generate, templated, prompt_lines):
    spoken = generate("hello", "--system", "be kind", model=templated).stdout
    text = templated_text(("user", "hello"), system="be kind")
    assert spoken == generate(text, "--raw", model=templated).stdout
    turns = [("user", "one"), ("assistant", "two"), ("user", "three")]
    messages = [{"role": role, "content": text} for role, text in turns]
    file = prompt_lines({"messages": messages}, "four")
    expected = [
        report(generate(text, "--raw", "--json", model=templated))["token_ids"]
        for text in (templated_text(*turns), templated_text(("user", "four")))
    ]
    found = generate("--prompts", file, "--json", model=templated).stdout.splitlines()
    assert [json.loads(line)["token_ids"] for line in found] == expected


def test_an_answer_that_was_begun_is_gone_on_with(generate, templated, prompt_lines):
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two th"}]
    found = report(generate("--prompts", prompt_lines({"messages": messages}), "--json", model=templated))
    assert found["token_ids"] == report(generate("<user>one|<assistant>two th", "--raw", "--json"))["token_ids"]


def test_a_template_gets_its_arguments_and_may_refuse(generate, templated, tmp_path, edited, prompt_lines):
    moody = edited(templated, tmp_path / "moody")
    (moody / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m['role'] == 'pirate' %}{{ raise_exception('no pirates') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}({{ mood }})"
    )
    spoken = generate("hello", "--chat-template-kwargs", '{"mood": "sad"}', model=moody).stdout
    assert spoken == generate("hello(sad)", "--raw", model=moody).stdout
    assert spoken != generate("hello", model=moody).stdout
    file = prompt_lines({"messages": [{"role": "pirate", "content": "ahoy"}]})
    fails(generate("--prompts", file, model=moody), "no pirates", "--raw")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--system", "be kind"], ["--system 'be kind'"]),
        (["--chat-template-kwargs", "{}"], ["--chat-template-kwargs"]),
        (["--raw", "--system", "be kind"], ["--system 'be kind'", "--raw"]),
        (["--system", ""], ["--system", "empty"]),
        (["--chat-template-kwargs", "{"], ["--chat-template-kwargs", "JSON"]),
        (["--chat-template-kwargs", "[" * 100_000], ["--chat-template-kwargs", "JSON"]),
        (["--chat-template-kwargs", "[]"], ["--chat-template-kwargs", "object"]),
        (["--chat-template-kwargs", '{"tokenize": false}'], ["'tokenize'"]),
    ],
)
def test_what_no_template_can_use(generate, arguments, words):
    fails(generate("hello", *arguments), *words)


def test_conversations_that_are_none(generate, templated, prompt_lines):
    user = {"role": "user", "content": "one"}
    for entry, words in [
        ({"messages": []}, ["line 1", '"messages"']),
        ({"messages": "hello"}, ["line 1", '"messages"']),
        ({"messages": [user, {"role": "user"}]}, ["line 1", "message 2"]),
        ({"messages": [{"role": 1, "content": "one"}]}, ["line 1", "message 1"]),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, ["line 1", "UTF-8"]),
        ({"messages": [user], "prompt": "both"}, ["line 1", '"prompt"', '"messages"']),
    ]:
        fails(generate("--prompts", prompt_lines(entry), model=templated), *words)
    both = prompt_lines({"messages": [{"role": "system", "content": "be kind"}, user]})
    fails(generate("--prompts", both, "--system", "be cruel", model=templated), "--system")
    file = prompt_lines({"messages": [user]})
    fails(generate("--prompts", file), '"prompt"')
    fails(generate("--prompts", file, "--raw", model=templated), "--raw was given")


def test_a_memory_is_warmed_with_what_will_be_asked(lade, templated, prompt_lines, tmp_path, tokenizer):
    def known(*arguments):
        """For how many of the longest contexts of the whole prompt the memory has the model's logits."""
        files = ["--prompts", prompt_lines("hello"), "--out", tmp_path / "m", "--fresh"]
        assert lade("warm", "-m", templated, *files, "-n", NEW, *arguments).exit_code == 0
        memory, longest = Memory.load(tmp_path / "m"), range(max(ORDERS), len(ids) + 1)
        return sum(len(memory.lookup(ids[:end])[0]) == len(ORDERS) for end in longest) / len(longest)

    ids = tokenizer(templated_text(("user", "hello"), system="be kind"))["input_ids"]
    assert known("--system", "be kind") == 1.0
    assert 0.0 < known() < 1.0 and known("--raw") == 0.0


# How an answer ends


@pytest.mark.slow
def test_an_answer_says_why_it_ended(generate, folder, prompt_lines, plain, tokenizer, tmp_path, edited):
    whole = plain(tokenizer(PROMPT)["input_ids"], NEW)
    text = tokenizer.decode(whole)
    many = ["--prompts", prompt_lines(PROMPT), "--json"]
    cases = [([], folder, "length"), (["--stop", text[3:5]], folder, "stop"), (["--stop", text[-2:]], folder, "stop")]
    end = next(token for token in whole if token != whole[0])
    ended = edited(folder, tmp_path / "ended", generation_config={"eos_token_id": [end]})
    cases.append(([], ended, "stop"))
    for arguments, model, reason in cases:
        for prompt in (["-p", PROMPT, "--json"], many):
            assert report(generate(*prompt, *arguments, model=model))["finish_reason"] == reason
    for model in (folder, ended):
        beams = report(generate("-p", PROMPT, "--json", "--num-beams", 2, model=model))
        stopped = model is ended and beams["token_ids"][-1] == end
        assert beams["finish_reason"] == ("stop" if stopped else "length")
    last = report(generate("-p", PROMPT, "--json", model=ended, new=whole.index(end) + 1))
    assert last["token_ids"][-1] == end and last["finish_reason"] == "stop", "the last of the tokens ends it"


def test_the_end_of_the_context_is_a_length(generate, with_position_table):
    prompt = "x" * (SHORT - 4)
    found = report(generate(prompt, "--json", model=with_position_table))
    assert found["new_tokens"] < NEW and found["finish_reason"] == "length"
    assert f"context of {SHORT}" in generate(prompt, model=with_position_table, env=TERMINAL).stdout


def test_an_interrupted_answer_says_so(generate, at_step):
    at_step(None, press_ctrl_c)
    result = generate(PROMPT, "--json")
    assert result.exit_code == 130 and json.loads(result.stdout)["finish_reason"] == "interrupted"


def test_a_terminal_shows_where_an_answer_begins_and_was_cut_off(templated, generate, plain, tokenizer):
    text = tokenizer.decode(plain(tokenizer(PROMPT)["input_ids"], NEW))
    shown = generate(PROMPT, env=TERMINAL).stdout
    assert f"[cut off: --max-new-tokens {NEW}]" in shown
    assert "cut off" not in generate(PROMPT, "--stop", text[3:5], env=TERMINAL).stdout
    assert generate(PROMPT).stdout == text + "\n", "a pipe gets nothing but the text"
    assert "hello\n\x1b[0m" in generate("hello", model=templated, env=TERMINAL).stdout, "an answer is on its own line"
    assert "hello\n\x1b[0m" not in generate("hello", env=TERMINAL).stdout

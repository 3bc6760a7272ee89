"""What one can say in a chat besides turns, and how a chat chooses tokens."""

import pytest
import torch
from shell_fixtures import press_ctrl_c
from spies import watched
from test_cli_errors import fails
from transformers import AutoTokenizer, LlamaForCausalLM

from lade.cli.conversation import Conversation
from lade.errors import UnsupportedArgumentError

NEW = 12
TURNS = ("tell me a story", "and then?", "more")
SAMPLED = {"do_sample": True, "temperature": 2.5, "top_k": 6, "top_p": 0.9}
WITH_SYSTEM = [{"role": "system", "content": "be brief"}]


@pytest.fixture
def sampling(templated, tmp_path, edited):
    """A checkpoint that asks for sampling."""
    return edited(templated, tmp_path / "sampling", generation_config=SAMPLED)


@pytest.fixture
def chat(lade, templated):
    """Run a chat of these lines; a result whose `answers` are the lines of standard output."""

    def run(*lines, path=templated, arguments=(), code=0):
        result = lade("chat", "-m", path, "-n", NEW, *arguments, stdin="".join(line + "\n" for line in lines))
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.stderr
        result.answers = result.stdout.split("\n")[:-1]
        return result

    return run


@pytest.fixture
def plainly(templated):
    """Answers of plain `model.generate` to the whole conversation, templated again for each turn."""
    tokenizer = AutoTokenizer.from_pretrained(templated)
    model = LlamaForCausalLM.from_pretrained(templated)

    def run(turns, seed=None, before=(), **arguments):
        messages, answers = list(before), []
        for number, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
            if seed is not None:
                torch.manual_seed(seed + number)
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **arguments)
            answers.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
            messages.append({"role": "assistant", "content": answers[-1].strip()})
        return answers

    return run


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", ["auto", "plain", "lookahead"])
def test_a_chat_says_what_plain_generate_says_to_the_whole_conversation(chat, plainly, sampling, method):
    arguments = ["--method", method]
    assert chat(*TURNS, arguments=arguments).answers == plainly(TURNS)
    sampled = chat(*TURNS, path=sampling, arguments=[*arguments, "--seed", 5]).answers
    assert sampled == plainly(TURNS, seed=5, **SAMPLED) != plainly(TURNS)
    assert chat(*TURNS, path=sampling, arguments=[*arguments, "--temperature", 0]).answers == plainly(TURNS)


def test_how_tokens_are_chosen_is_said_first(chat, sampling, templated):
    def said(path, *arguments):
        return chat(path=path, arguments=arguments).stderr.splitlines()[1]

    limits = "temperature 2.5, top_k 6, top_p 0.9"
    assert said(sampling) == f"sampling as the checkpoint asks: {limits} · greedy with --temperature 0"
    assert said(sampling, "--temperature", 1, "--top-k", 0) == "sampling: temperature 1, top_k 0, top_p 0.9"
    assert said(sampling, "--do-sample") == f"sampling: {limits}"
    assert said(sampling, "--temperature", 0) == "greedy; the checkpoint asks for sampling"
    assert said(templated) == "greedy, as the checkpoint asks for no sampling · sampling with --temperature T"


def test_a_system_prompt_holds_from_the_next_turn_on_and_can_be_taken_back(chat, plainly):
    result = chat("/system be brief", *TURNS[:2], "/reset", TURNS[0], "/system", "/reset", TURNS[0], "/system")
    with_it = plainly(TURNS[:2], before=WITH_SYSTEM)
    assert result.answers == [*with_it, with_it[0], plainly(TURNS[:1])[0]]
    assert with_it[0] != plainly(TURNS[:1])[0]
    assert "removed" in result.stderr and "no system prompt" in result.stderr
    assert chat(TURNS[0], arguments=["--system", "be brief"]).answers == with_it[:1]


def test_amid_a_conversation_it_changes_all_of_it(chat, plainly):
    (first,) = plainly(TURNS[:1])
    said = [{"role": "user", "content": TURNS[0]}, {"role": "assistant", "content": first.strip()}]
    second = plainly(TURNS[1:2], before=[*WITH_SYSTEM, *said])
    assert chat(TURNS[0], "/system be brief", TURNS[1]).answers == [first, *second]


TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages if m['role'] != 'system' %}" + TEMPLATE[26:], "ignores system prompts"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('No system!') }}{% endif %}" + TEMPLATE,
            "No system!",
        ),
        (None, "chat template"),
    ],
)
def test_a_system_prompt_that_the_model_would_not_see_is_refused(lade, chat, folder, tmp_path, edited, template, words):
    path = edited(folder, tmp_path / "m")
    if template:
        (path / "chat_template.jinja").write_text(template)
    result = chat("/system be brief", TURNS[0], path=path)
    assert words in result.stderr and len(result.answers) == 1
    assert result.answers == chat(TURNS[0], path=path).answers
    fails(lade("chat", "-m", path, "--system", "be brief"), words)


@pytest.mark.parametrize("kind", ["templated", "folder"])
def test_retry_answers_again_in_place_of_the_answer(chat, request, kind):
    path = request.getfixturevalue(kind)
    once = chat(*TURNS, path=path).answers
    again = chat(TURNS[0], "/retry", TURNS[1], "/retry", "/retry", TURNS[2], path=path)
    assert again.answers == [once[0], once[0], once[1], once[1], once[1], once[2]]


def test_retry_draws_with_the_next_seed(chat, plainly, sampling):
    result = chat(TURNS[0], "/retry", path=sampling, arguments=["--seed", 7])
    assert result.answers == [plainly(TURNS[:1], seed=seed, **SAMPLED)[0] for seed in (7, 8)]
    assert result.answers[0] != result.answers[1]
    assert "error: " in chat("/retry").stderr


def test_an_answer_that_was_cut_is_marked(chat, templated, tmp_path, edited, plainly, tokenizer):
    assert chat(TURNS[0]).stderr.count(f"[cut off after {NEW} tokens; --max-new-tokens allows more]") == 1
    (answer,) = plainly(TURNS[:1])
    last = tokenizer(answer)["input_ids"][-1]
    place = tokenizer(answer)["input_ids"].index(last)
    ending = edited(templated, tmp_path / "m", generation_config={"eos_token_id": last})
    for new in (place + 1, NEW):
        result = chat(TURNS[0], path=ending, arguments=["-n", new])
        assert result.answers == [answer[: place + 1]] and "[cut" not in result.stderr
    stopped = chat(TURNS[0], arguments=["--stop", answer[-3:]])
    assert stopped.answers == [answer] and "[cut" not in stopped.stderr


def test_commands_take_what_they_take_and_text_of_several_lines_is_one_turn(chat, plainly):
    result = chat('"""/what', "is", '  this"""', "one \\", "two")
    assert result.answers == plainly(["/what\nis\n  this", "one \ntwo"])
    result = chat("/reset now", "/quit later", "/etc", "/image", "/exit")
    lines = [line for line in result.stderr.splitlines() if line.startswith(("error", "unknown"))]
    assert lines == [
        "error: /reset takes no argument",
        "error: /quit takes no argument",
        "unknown command /etc: /help lists the commands",
        "error: /image needs a file: /image FILE",
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_ctrl_c_ends_an_answer_whenever_it_is_pressed(chat, plainly, monkeypatch, at_step, times):
    """Once: between two steps. Twice: amid a forward pass. Three times: also while the answer is taken up."""
    answered, pressed = Conversation.add_answer, []

    def press():
        pressed.append(times)
        for _ in range(min(times, 2)):
            press_ctrl_c()

    def interrupted(self, turn, answer):
        if times == 3 and len(pressed) == 1:
            pressed.append(turn)
            for _ in range(2):
                press_ctrl_c()
        answered(self, turn, answer)

    at_step(3, press, text=1)
    monkeypatch.setattr(Conversation, "add_answer", interrupted)
    result = chat(TURNS[0], "/reset", *TURNS)
    assert "interrupted" in result.stderr and len(result.answers) == 4
    assert len(result.answers[0]) < NEW and result.answers[1:] == plainly(TURNS)


def test_ctrl_c_that_comes_after_the_last_step_changes_nothing(chat, plainly, monkeypatch):
    watched(monkeypatch, Conversation, "add_answer", lambda *_: press_ctrl_c())
    result = chat(*TURNS)
    assert result.answers == plainly(TURNS) and "interrupted" not in result.stderr


def test_an_error_ends_an_answer_and_not_the_chat(chat, plainly, at_step):
    def fail():
        raise UnsupportedArgumentError("no such thing", "leave it out")

    at_step(3, fail, text=2)
    result = chat(TURNS[0], "lost", *TURNS[1:])
    assert "error: no such thing" in result.stderr
    answers = plainly(TURNS)
    assert result.answers[:1] + result.answers[2:] == answers and len(result.answers[1]) < NEW

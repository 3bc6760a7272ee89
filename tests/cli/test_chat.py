import pytest
import torch
from shell_fixtures import press_ctrl_c

from lade.cli.conversation import Conversation
from lade.cli.loading import load
from lade.cli.options.model import Loading, Template
from lade.cli.run import Generation, decode
from lade.cli.terminal import terminal
from lade.errors import InputError

CONTEXT = 512  # of the model in conftest.py


@pytest.fixture
def subject():
    def make(path):
        with terminal() as term:
            return load(Loading(str(path), device="cpu"), term=term)

    return make


def turn(conversation, subject, text, method="auto", new=15):
    """One turn; returns the prompt, the answer, and how many tokens its first pass fed."""
    asked = conversation.next_turn(text)
    prompt, steps = asked.prompt, []
    with terminal() as term:
        answer = decode(
            subject,
            prompt,
            lookahead=None if method == "plain" else method,
            max_new_tokens=new,
            term=term,
            on_step=steps.append,
            cache=conversation.cache,
        )
    conversation.add_answer(asked, answer)
    return prompt, answer, steps[0].fed


def fresh(subject, prompt, new=15):
    output = subject.model.generate(torch.tensor([prompt]), max_new_tokens=new)
    return output[0, len(prompt) :].tolist()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", ["auto", "plain"])
@pytest.mark.parametrize("kind", ["folder", "templated", "unsupported"])
def test_answers_are_those_of_a_fresh_generation_from_the_whole_conversation(subject, request, kind, method):
    chatting = subject(request.getfixturevalue(kind))
    conversation = Conversation(chatting, Template())
    for text in ("tell me a story", "and then, what came", "more"):
        prompt, answer, _ = turn(conversation, chatting, text, method)
        assert answer.token_ids == fresh(chatting, prompt)


@pytest.mark.parametrize("kind", ["folder", "templated"])
def test_the_second_turn_feeds_only_what_is_new(subject, request, kind):
    chatting = subject(request.getfixturevalue(kind))
    conversation = Conversation(chatting, Template())
    first, answer, fed = turn(conversation, chatting, "tell me a long story about a cat")
    assert fed == len(first)
    second, _, fed = turn(conversation, chatting, "more")
    assert fed == len(second) - (len(first) + len(answer.token_ids) - 1)  # the last answered token is not cached yet


def test_a_turn_that_changes_what_was_said_drops_just_that_from_the_cache(subject, templated):
    chatting = subject(templated)
    conversation = Conversation(chatting, Template())
    first, _, _ = turn(conversation, chatting, "one")
    conversation._turns[-1]["content"] = "@"
    second, answer, fed = turn(conversation, chatting, "two")
    assert fed == len(second) - len(first)
    assert answer.token_ids == fresh(chatting, second)


def test_the_same_prompt_again_feeds_its_last_token(subject, folder):
    chatting = subject(folder)
    conversation = Conversation(chatting, Template())
    prompt, _, _ = turn(conversation, chatting, "abc")
    assert conversation.retry().prompt == prompt
    assert conversation.cached == len(prompt) - 1


def test_after_a_torn_pass_the_cache_is_a_new_one(subject, folder):
    chatting = subject(folder)
    conversation = Conversation(chatting, Template())
    _, answer, _ = turn(conversation, chatting, "abc")
    conversation.add_answer(conversation.retry(), Generation(token_ids=answer.token_ids, torn=True))
    assert conversation.cached == 0
    prompt, answer, fed = turn(conversation, chatting, "more")
    assert fed == len(prompt) and answer.token_ids == fresh(chatting, prompt)


def test_a_conversation_that_outgrows_the_context_is_refused_and_unchanged(subject, templated):
    chatting = subject(templated)
    conversation = Conversation(chatting, Template())
    turn(conversation, chatting, "one")
    tokens, cached = conversation.tokens, conversation.cached
    with pytest.raises(InputError, match=f"{CONTEXT}.*/reset"):
        conversation.next_turn("x" * CONTEXT)
    assert (conversation.tokens, conversation.cached) == (tokens, cached)


def test_a_session_in_a_pipe(lade, templated, subject):
    chatting = subject(templated)
    result = lade(
        "chat", "-m", templated, "-n", 10, stdin="/stats\nhello\n\n/what\nagain\n/stats\n/reset\nhello\n/help\n"
    )
    assert result.exit_code == 0, result.output
    conversation = Conversation(chatting, Template())
    answers = [turn(conversation, chatting, text, new=10)[1].token_ids for text in ("hello", "again")]
    answers.append(answers[0])
    assert result.stdout == "".join(chatting.tokenizer.decode(ids) + "\n" for ids in answers)
    assert "/what" in result.stderr
    assert "0 turns, 0 tokens" in result.stderr and "2 turns, " in result.stderr
    assert "/reset          forget" in result.stderr
    assert "20 tokens in 2 + " in result.stderr
    assert result.stderr.count("Drafted in ") == 2, "after the first answer, and by /stats once there is an answer"
    assert "no chat template" not in result.stderr


def test_quit_ends_it_and_a_missing_template_is_said(lade, folder):
    result = lade("chat", "-m", folder, "-n", 10, stdin="/quit\nhello\n")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no chat template" in result.stderr


def test_a_model_that_cannot_be_served_chats_plainly(lade, unsupported):
    result = lade("chat", "-m", unsupported, "-n", 10, stdin="hello\nagain\n")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("running at normal speed") == 1
    assert len(result.stdout.splitlines()) == 2


def test_a_full_context_is_said_and_reset_helps(lade, folder):
    result = lade("chat", "-m", folder, "-n", 40, stdin="x" * (CONTEXT - 20) + "\nmore\n/reset\nhello\n")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [len(line) for line in lines] == [20, 40]
    assert "is full; /reset" in result.stderr
    assert "error: with this turn" in result.stderr


def test_input_that_is_not_utf8_is_bad_input(lade, folder):
    result = lade("chat", "-m", folder, stdin=b"caf\xe9 au lait\n")
    assert result.exit_code == 2
    assert "not UTF-8" in result.stderr


@pytest.mark.parametrize("method", ["plain", "lookahead"])
def test_ctrl_c_stops_the_answer_and_not_the_chat(lade, templated, subject, method, at_step):
    at_step(4, press_ctrl_c, text=1)
    result = lade("chat", "-m", templated, "-n", 30, "--method", method, stdin="hello\nagain\n")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("interrupted") == 1
    first, second = result.stdout.splitlines()
    assert len(first) < 30
    chatting = subject(templated)
    prompt = chatting.tokenizer(f"<user>hello|<assistant>{first.strip()}|<user>again|<assistant>")["input_ids"]
    assert second == chatting.tokenizer.decode(fresh(chatting, prompt, 30))

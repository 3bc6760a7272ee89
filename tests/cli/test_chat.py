import pytest
import torch
from shell_fixtures import CONTEXT, press_ctrl_c

from lade.cli.conversation import Conversation
from lade.cli.loading import load
from lade.cli.options.model import Loading, Template
from lade.cli.run import Generation, decode
from lade.cli.terminal import terminal
from lade.errors import InputError


class Chat(Conversation):
    """A conversation with the model of a folder."""

    def __init__(self, path):
        with terminal() as term:
            self.subject = load(Loading(str(path), device="cpu"), term=term)
        super().__init__(self.subject, Template())

    def turn(self, text, method="auto", new=15):
        """One turn; returns the prompt, the answer, and how many tokens its first pass fed."""
        asked, steps = self.next_turn(text), []
        given = {"lookahead": None if method == "plain" else method, "max_new_tokens": new, "cache": self.cache}
        with terminal() as term:
            answer = decode(self.subject, asked.prompt, term=term, on_step=steps.append, **given)
        self.add_answer(asked, answer)
        return asked.prompt, answer, steps[0].fed

    def fresh(self, prompt, new=15):
        output = self.subject.model.generate(torch.tensor([prompt]), max_new_tokens=new)
        return output[0, len(prompt) :].tolist()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", ["auto", "plain"])
@pytest.mark.parametrize("kind", ["folder", "templated", "unsupported"])
def test_answers_are_those_of_a_fresh_generation_from_the_whole_conversation(request, kind, method):
    chat = Chat(request.getfixturevalue(kind))
    for text in ("tell me a story", "and then, what came", "more"):
        prompt, answer, _ = chat.turn(text, method)
        assert answer.token_ids == chat.fresh(prompt)


@pytest.mark.parametrize("kind", ["folder", "templated"])
def test_the_second_turn_feeds_only_what_is_new_and_the_same_prompt_its_last_token(request, kind):
    chat = Chat(request.getfixturevalue(kind))
    first, answer, fed = chat.turn("tell me a long story about a cat")
    assert fed == len(first)
    second, _, fed = chat.turn("more")
    assert fed == len(second) - (len(first) + len(answer.token_ids) - 1)  # the last answered token is not cached yet
    assert chat.retry().prompt == second and chat.cached == len(second) - 1


def test_a_turn_that_changes_what_was_said_drops_just_that_from_the_cache(templated):
    chat = Chat(templated)
    first, _, _ = chat.turn("one")
    chat._turns[-1]["content"] = "@"
    second, answer, fed = chat.turn("two")
    assert fed == len(second) - len(first)
    assert answer.token_ids == chat.fresh(second)


def test_after_a_torn_pass_the_cache_is_a_new_one(folder):
    chat = Chat(folder)
    _, answer, _ = chat.turn("abc")
    chat.add_answer(chat.retry(), Generation(token_ids=answer.token_ids, torn=True))
    assert chat.cached == 0
    prompt, answer, fed = chat.turn("more")
    assert fed == len(prompt) and answer.token_ids == chat.fresh(prompt)


def test_a_conversation_that_outgrows_the_context_is_refused_and_unchanged(templated):
    chat = Chat(templated)
    chat.turn("one")
    tokens, cached = chat.tokens, chat.cached
    with pytest.raises(InputError, match=f"{CONTEXT}.*/reset"):
        chat.next_turn("x" * CONTEXT)
    assert (chat.tokens, chat.cached) == (tokens, cached)


def test_a_session_in_a_pipe(lade, templated, tokenizer):
    lines = "/stats\nhello\n\n/what\nagain\n/stats\n/reset\nhello\n/help\n"
    result = lade("chat", "-m", templated, "-n", 10, stdin=lines)
    assert result.exit_code == 0, result.output
    chat = Chat(templated)
    answers = [chat.turn(text, new=10)[1].token_ids for text in ("hello", "again")]
    answers.append(answers[0])
    assert result.stdout == "".join(tokenizer.decode(ids) + "\n" for ids in answers)
    assert "/what" in result.stderr
    assert "0 turns, 0 tokens" in result.stderr and "2 turns, " in result.stderr
    assert "/reset          forget" in result.stderr
    assert "20 tokens in 2 + " in result.stderr
    assert result.stderr.count("Drafted in ") == 2, "after the first answer, and by /stats once there is an answer"
    assert "no chat template" not in result.stderr


def test_quit_ends_it_a_missing_template_is_said_and_input_that_is_not_utf8_is_bad_input(lade, folder):
    result = lade("chat", "-m", folder, "-n", 10, stdin="/quit\nhello\n")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no chat template" in result.stderr
    result = lade("chat", "-m", folder, stdin=b"caf\xe9 au lait\n")
    assert result.exit_code == 2 and "not UTF-8" in result.stderr


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


@pytest.mark.parametrize("method", ["plain", "lookahead"])
def test_ctrl_c_stops_the_answer_and_not_the_chat(lade, templated, tokenizer, method, at_step):
    at_step(4, press_ctrl_c, text=1)
    result = lade("chat", "-m", templated, "-n", 30, "--method", method, stdin="hello\nagain\n")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("interrupted") == 1
    first, second = result.stdout.splitlines()
    assert len(first) < 30
    prompt = tokenizer(f"<user>hello|<assistant>{first.strip()}|<user>again|<assistant>")["input_ids"]
    assert second == tokenizer.decode(Chat(templated).fresh(prompt, 30))

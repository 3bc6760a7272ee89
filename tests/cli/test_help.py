"""Help that can be read at 80 columns, and completion in the shell."""

import re

import pytest
import typer.main
from typer.testing import CliRunner

from lade.cli.main import app
from lade.cli.options.decoding import METHODS
from lade.cli.options.model import DEVICES, DTYPES, QUANTIZATIONS

PANELS = {
    "Arguments": ["PROMPT"],
    "Options": ["--prompt", "--prompts", "--max-new-tokens", "--image", "--prediction-file", "--help"],
    "Chat template": ["--raw", "--system", "--chat-template-kwargs"],
    "Choosing tokens": [
        "--temperature", "--do-sample", "--top-k", "--top-p", "--min-p", "--seed", "--repetition-penalty",
        "--num-beams", "--stop",
    ],
    "Structured output": ["--json-schema", "--regex", "--grammar"],
    "Speed": ["--method", "--memory", "--pack", "--invariant"],
    "Draft sizes": ["--window", "--ngram", "--guesses", "--budget"],
    "Model": ["--model", "--dtype", "--device"],
    "Model loading": [
        "--revision", "--adapter", "--device-map", "--quantization", "--weights", "--attn-implementation",
        "--trust-remote-code", "--token", "--cache-dir", "--local-files-only",
    ],
    "Output": ["--json", "--quiet", "--no-color", "--debug"],
}  # fmt: skip
"""All that `lade generate --help` lists, in its order."""


def shown(*command):
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.stdout.splitlines()


def panels(lines):
    """Titles with the rows below them: first words, and how many lines they take without default and variable."""
    found, rows = {}, None
    for line in lines:
        if title := re.match(r"╭─ (.+?) ─", line):
            rows = found[title[1]] = []
        elif row := re.match(r"│ [* ]? *?(--?[a-z][\w-]*|\[?[A-Z]+\]?) ", line):
            rows.append([row[1].strip("[]"), 1])
        elif rows and line.startswith("│") and not re.search(r"\[(env var|default|required)|LADE_\w+\]", line):
            rows[-1][1] += 1
    return found


def test_generate_has_all_of_its_options_in_panels():
    found = panels(shown("generate"))
    assert {title: [name for name, _ in rows] for title, rows in found.items()} == PANELS
    assert list(found) == list(PANELS)


@pytest.mark.parametrize("command", ["generate", "warm", "info", "doctor", "bench", "bench scaling", "chat", "demo"])
def test_no_option_takes_more_than_a_few_lines_at_80_columns_and_there_is_an_example(command):
    lines = shown(*command.split())
    assert command == "bench scaling" or any(f"Example:  lade {command} " in line for line in lines)
    assert max(map(len, lines)) <= 80
    for title, rows in panels(lines).items():
        for name, height in rows:
            assert height <= 5, (title, name)


def test_flags_are_shown_alike_without_a_type():
    names = ("generate", "chat", "serve", "batch", "info", "doctor", "warm", "pack", "demo", "export-recipe", "bench")
    for command in ([], *([name] for name in names), ["bench", "compare"], ["bench", "scaling"]):
        assert not any(re.search(r"<[a-z]+>|BOOLEAN", line) for line in shown(*command)), command


def test_the_command_for_a_first_look_has_no_expert_options():
    names = {name for rows in panels(shown("demo")).values() for name, _ in rows}
    assert "--model" in names and not {"--revision", "--token", "--quantization"} & names


def every_option():
    def options(command, path):
        for parameter in command.params:
            yield f"{path} --{parameter.name}", parameter
        for name, each in getattr(command, "commands", {}).items():
            yield from options(each, f"{path} {name}")

    return list(options(typer.main.get_command(app), "lade"))


def test_every_option_has_a_help_and_one_thing_has_one_name():
    """Prompts, memories and seeds are given in the same way to every command that takes them."""
    for name, parameter in every_option():
        assert parameter.help, name
        assert not re.match("(Same as|Of the|As for|See) ", parameter.help), name
    names = {name for _, parameter in every_option() for name in parameter.opts}
    assert {"--prompts", "--memory", "--seed", "--inflate"} <= names
    assert not {"--workload", "--seeds", "--prompts-file", "--draft-memory", "--num-prompts", "--padded"} & names


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gen"], ["generate"]),
        (["generate", "--dty"], ["--dtype"]),
        (["generate", "--dtype", ""], DTYPES),
        (["info", "--device", ""], DEVICES),
        (["chat", "--method", ""], METHODS),
        (["info", "--quantization", ""], QUANTIZATIONS),
    ],
)
def test_a_shell_completes_commands_options_and_values(words, expected):
    variables = {"_LADE_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["lade", *words])}
    variables["COMP_CWORD"] = str(len(words))
    result = CliRunner().invoke(app, [], env=variables, prog_name="lade")
    assert result.stdout.split() == list(expected)
    assert "--install-completion" in "\n".join(shown())

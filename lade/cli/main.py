"""Entry point: the commands of the shell, each of which imports torch only when it runs."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from lade import __version__
from lade.cli import batch, chat, demo, generate, info, pack, serve, warm
from lade.cli.options import ShellCommand, ShellGroup
from lade.cli.options import decoding as options
from lade.cli.terminal import terminal

app = typer.Typer(
    name="lade",
    cls=ShellGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lade {__version__}")
        raise typer.Exit


@app.callback(epilog="First look:  [bold]lade demo[/bold]")
def _lade(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Lookahead decoding: any Hugging Face causal language model, the same tokens, fewer forward passes."""


_RECIPE_EXAMPLE = (
    "Example:  [bold]lade export-recipe ./recipe[/bold], and in Python "
    '[bold]model.generate(**inputs, custom_generate="./recipe", trust_remote_code=True)[/bold]'
)


@options.grouped
def export_recipe(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; created if it does not exist.")],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Add custom_generate/ to a folder with other files, such as a model's, which are left unchanged.",
        ),
    ] = False,
    *,
    output: options.Output,
) -> None:
    """Write the recipe for generate(custom_generate=DIR), for any caller of transformers' generate.

    Pipelines, agents and evaluations pass it on. The folder can be uploaded to the hub as it is.
    """
    with terminal(output) as term:
        from lade.recipe import CARD
        from lade.recipe import export_recipe as export

        written = export(folder, force=force)
        for file in written:
            term.say(f"wrote {file}", "dim")
        beside_a_model = folder / CARD not in written
        call = "AutoModelForCausalLM.from_pretrained(" if beside_a_model else "model.generate(..., custom_generate="
        term.say(f"use it:  {call}{str(folder)!r}, trust_remote_code=True)")


for _name, _epilog, _command in (
    ("generate", generate.EXAMPLE, generate.generate),
    ("chat", chat.EXAMPLE, chat.chat),
    ("serve", serve.EXAMPLE, serve.serve),
    ("batch", batch.EXAMPLE, batch.batch),
    ("info", info.EXAMPLE, info.info),
    ("doctor", info.DOCTOR_EXAMPLE, info.doctor),
    ("warm", warm.EXAMPLE, warm.warm),
    ("pack", pack.EXAMPLE, pack.pack),
    ("export-recipe", _RECIPE_EXAMPLE, export_recipe),
    ("demo", demo.EXAMPLE, demo.demo),
):
    app.command(_name, epilog=_epilog, cls=ShellCommand)(_command)
for _commands in entry_points(group="lade.commands"):  # `lade bench`, from the package that measures
    _commands.load()(app)


def main() -> None:
    """Run the shell, for `lade` and `python -m lade`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end a generation
    app(prog_name="lade")

"""`lade export-recipe`: write a folder for transformers' `generate(custom_generate=...)`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lade.cli.options import decoding as options
from lade.cli.terminal import terminal

EXAMPLE = (
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
            help="Add custom_generate/ to a folder with other files, such as a model's, which stay as they are.",
        ),
    ] = False,
    *,
    output: options.Output,
) -> None:
    """Write the recipe for generate(custom_generate=DIR), for any caller of transformers' generate.

    Pipelines, agents and evaluations pass it on. The folder can be uploaded to the hub as it is.
    """
    with terminal(output) as term:
        from lade.recipe.export import CARD
        from lade.recipe.export import export_recipe as export

        written = export(folder, force=force)
        for file in written:
            term.say(f"wrote {file}", "dim")
        beside_a_model = folder / CARD not in written
        call = "AutoModelForCausalLM.from_pretrained(" if beside_a_model else "model.generate(..., custom_generate="
        term.say(f"use it:  {call}{str(folder)!r}, trust_remote_code=True)")

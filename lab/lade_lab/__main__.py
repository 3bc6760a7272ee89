"""`python -m lade_lab bench ...`: the shell with `lade bench`, also where the package is not installed."""

from lade.cli.main import app, main
from lade_lab.cli.command import register

if "bench" not in {command.name for command in app.registered_commands} | {each.name for each in app.registered_groups}:
    register(app)
main()

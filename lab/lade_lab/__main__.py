"""`python -m lade_lab COMMAND`: the shell with `lade bench`, also where the package is not installed, and with more."""

from lade.cli.main import app, main
from lade.cli.options import ShellCommand
from lade_lab.acceptance import command as acceptance
from lade_lab.cli.command import register
from lade_lab.soak import command as soak

if "bench" not in {command.name for command in app.registered_commands} | {each.name for each in app.registered_groups}:
    register(app)
app.command("soak", epilog=soak.EXAMPLE, cls=ShellCommand)(soak.soak)
app.command("acceptance", epilog=acceptance.EXAMPLE, cls=ShellCommand)(acceptance.acceptance)
main()

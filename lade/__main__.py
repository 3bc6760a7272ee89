"""Entry point of `python -m lade`, which is the command `lade`."""

from lade.cli.main import main

if __name__ == "__main__":
    main()

"""`python -m lade` is `lade`."""

from lade.cli.main import main

if __name__ == "__main__":
    main()

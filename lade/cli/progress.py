"""Progress bars that write nothing at all where they are disabled."""

from __future__ import annotations

from rich import progress


class Progress(progress.Progress):
    """A bar of rich, of which versions before 15 end even a disabled one with an empty line off a terminal."""

    def stop(self) -> None:
        """As `rich.progress.Progress.stop`; a no-op where the bar is disabled."""
        if not self.disable:
            super().stop()

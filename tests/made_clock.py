"""A clock whose time passes when it is told so, and a thread that others may hold up."""

from dataclasses import dataclass

from lade.clock import Duration


@dataclass
class MadeClock:
    """See `lade.clock.Clock`.

    Attributes:
        wall_s: seconds since it was made.
        running_s: of these the seconds in which the thread ran.
    """

    wall_s: float = 0.0
    running_s: float = 0.0

    def run(self, seconds: float, waiting_s: float = 0.0) -> None:
        """The thread runs, and then waits for a processor."""
        self.running_s += seconds
        self.wall_s += seconds + waiting_s

    def start(self) -> Duration:
        """See `Clock`."""
        return Duration(self.wall_s, self.running_s, 0)

    def since(self, start: Duration) -> Duration:
        """See `Clock`."""
        return Duration(self.wall_s - start.wall_s, self.running_s - start.running_s)

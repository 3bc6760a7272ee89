"""A clock whose time passes when it is told so, and a thread that others may hold up."""

from dataclasses import dataclass

from lade.clock import Duration
from lade.decoding.drafting.step_cost import StepCost
from lade_lab.fakes import FunctionRunner


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


class TimedRunner(FunctionRunner):
    """Whose passes take what a cost says, by its clock, whatever else the machine does; the library `own_s` each."""

    clock: MadeClock

    def __init__(self, follow, vocabulary, cost: StepCost, own_s: float = 0.0) -> None:
        super().__init__(follow, vocabulary)
        self.clock, self.cost, self.own_s = MadeClock(), cost, own_s

    def forward(self, trees, rows, cache):
        """See `FunctionRunner`."""
        seconds = self.cost.seconds(max(map(len, trees)))
        self.pass_time = Duration(seconds, seconds)
        self.clock.run(seconds + self.own_s)
        return super().forward(trees, rows, cache)

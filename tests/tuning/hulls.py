"""The curve that the marginal costs of a step cost add up to."""

import numpy as np

from lade.decoding.drafting.controller import LARGEST_SHARED
from lade.decoding.drafting.step_cost import StepCost


def lower_hull(cost: StepCost) -> list[float]:
    """Seconds on the lower convex hull by size, 0 to `LARGEST_SHARED`; entry 0 repeats entry 1."""
    return np.interp(range(LARGEST_SHARED + 1), cost.corners, [cost.table[size] for size in cost.corners]).tolist()

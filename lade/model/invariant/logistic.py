"""Numbers times the logistic function of a multiple of theirs: SiLU and all that is like it.

Nothing in it is a sum, and all numbers go through the same instructions (`kernels.logistic`): so a number has the same
bits wherever it stands.
"""

from __future__ import annotations

import torch

from lade.model.kernels.kinds import is_plain, kind_of, refuse
from lade.model.kernels.logistic import weigh_by_logistic
from lade.model.kernels.vectors import WIDEST
from lade.model.worker_threads import bits, in_team

_MANY = 2**14  # numbers that are worth a thread of their own
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def takes(x: torch.Tensor) -> bool:
    """Whether the kernel computes this, and nobody wants gradients of it."""
    return is_plain(x) and x.dtype in _DTYPES and not (torch.is_grad_enabled() and x.requires_grad)


def times_logistic(x: torch.Tensor, steep: float = 1.0, cubic: float = 0.0) -> torch.Tensor:
    """The argument times the logistic function of `steep * x + cubic * x ** 3`, computed in float32, without gradients.

    Args:
        x: of 16 or 32 bits, on the CPU.
        steep: see above.
        cubic: see above.

    Raises:
        ValueError: x is of another dtype, on another device, or wants gradients.
    """
    if not takes(x):
        refuse("x times a logistic function", "float32, bfloat16 and float16 on the CPU, without gradients", x=x)
    if x.dtype == torch.float16:
        return times_logistic(x.float(), steep, cubic).to(x.dtype)
    numbers = x.numel()
    if numbers < WIDEST:  # fewer than a vector may have
        padded = torch.nn.functional.pad(x.reshape(-1), (0, WIDEST - numbers))
        return times_logistic(padded, steep, cubic)[:numbers].view(x.shape)
    x = x.contiguous()
    found = torch.empty_like(x)
    fields = x.data_ptr(), found.data_ptr(), kind_of(x.dtype), bits(-steep), bits(-cubic), numbers
    in_team(weigh_by_logistic, fields, max(1, min(torch.get_num_threads(), numbers // _MANY)), holds=(x, found))
    return found

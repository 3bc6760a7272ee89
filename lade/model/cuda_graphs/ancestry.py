"""Who descends from whom in the trees of a captured pass: all follows from the closure, on the device."""

from __future__ import annotations

import torch


class ClosureAncestry:
    """See `lade.model.recurrent.tree_pass.Ancestry`.

    Args:
        closure: `[B, S, S]` bool, see `TokenTree.closure`; nodes come after their ancestors. What fills a row up may
            descend from the root without being its own descendant.
    """

    def __init__(self, closure: torch.Tensor) -> None:
        self.size: int = closure.shape[1]
        self.state: torch.Tensor | None = None
        self._closure = closure
        self._windows: dict[tuple[int, int], torch.Tensor] = {}

    def closure(self, device: torch.device) -> torch.Tensor:
        """See `Ancestry.closure`."""
        return self._closure.to(device)

    def windows(self, width: int, cached: int, device: torch.device) -> torch.Tensor:
        """See `Ancestry.windows`."""
        key = width, cached
        if key not in self._windows:
            numbers = torch.arange(self.size, device=self._closure.device)
            earlier = self._closure & (numbers < numbers[:, None])
            parents = torch.where(earlier, numbers, -1).amax(-1)  # [B, S]: the last of the ancestors; -1 for roots
            columns = [numbers.expand_as(parents)]
            for _ in range(width - 1):
                node = columns[-1]
                columns.append(torch.where(node >= 0, parents.gather(1, node.clamp(min=0)), node - 1))
            self._windows[key] = torch.stack(columns[::-1], dim=-1) + cached
        return self._windows[key].to(device)

"""Grow a checkpoint's MTP layer with its model, so that its passes cost what a larger model's layer costs.

The layer goes into the corner of a larger one by the rules of `lade_lab.inflation`. Its input projection reads
embedding and hidden state side by side: each half grows by itself, and writes zeros into what is new of the state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from lade_lab.inflation import PARTS, Filler, Part

FILE = Path("mtp") / "model.safetensors"
"""Place of a layer in a checkpoint's folder, if it is not among the model's own weights."""
_INPUT = "fc"
_NORMS = "pre_fc_norm_embedding", "pre_fc_norm_hidden"
_PARTS = PARTS | dict.fromkeys(_NORMS, PARTS["norm"]) | {_INPUT: Part(("hidden", "hidden"), "zeros")}


@torch.no_grad()
def inflate_layer(small: PreTrainedModel, large: PreTrainedModel, folder: Path) -> None:
    """Write the layer of a small model's checkpoint for the larger one, which finds it from then on.

    Args:
        small: a model that was loaded from a folder with `FILE`.
        large: `lade_lab.inflation.inflate` of it; its configuration names `folder` afterwards.
        folder: written to.

    Raises:
        FileNotFoundError: the small model's folder has no layer of its own.
    """
    own: Any = small.config
    grown: Any = large.config
    factor = grown.hidden_size // own.hidden_size
    filler = Filler(factor, large.dtype, torch.device("cpu"), seed=0)
    weights = dict[str, torch.Tensor]()
    for name, weight in load_file(Path(own.name_or_path) / FILE).items():
        part = _PARTS[name.split(".")[-2]]
        halves = weight.chunk(2, dim=1) if name.split(".")[-2] == _INPUT else (weight,)
        shape = part.grown(halves[0].shape, factor, grown.intermediate_size)
        weights[name] = torch.cat([filler.grown(part, shape, half) for half in halves], dim=-1)
    (folder / FILE).parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / FILE)
    grown.name_or_path, grown.num_mtp_layers = str(folder), 1

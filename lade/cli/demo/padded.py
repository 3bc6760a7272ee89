"""The embedded model at the cost of a larger one: padded with weights that do not change what it writes."""

from __future__ import annotations

from dataclasses import replace

import torch

from lade.backends.cpu.invariant import make_invariant
from lade.backends.cpu.packing import pack as packing
from lade.cli.demo.rounds import PADDED
from lade.cli.loading.load import LoadedModel
from lade.cli.options.model import Loading
from lade.cli.terminal import Terminal
from lade.errors import ConfigError, UnsupportedModelError


def padded(loaded: LoadedModel, params: float, loading: Loading, term: Terminal) -> LoadedModel:
    """Return the model padded to a number of parameters, in bfloat16 unless another dtype was asked for.

    In 16 bits on a CPU it is packed and made batch invariant, so that its texts are those of plain decoding bit for
    bit; all methods run on these weights. Where that is not available it is in float32.

    Args:
        loaded: the embedded model, or another one that `lade.bench.inflate` takes.
        params: wanted number of parameters.
        loading: options of the model, whose dtype is used if it is not "auto".
        term: terminal that shows the progress.

    Raises:
        ConfigError: the number is smaller than the model's, or does not fit in memory.
    """
    from lade_lab.inflation import inflate

    given = None if loading.dtype == "auto" else getattr(torch, loading.torch_dtype)
    dtype = given or torch.bfloat16
    term.show_status(f"padding the model to {params / 1e6:.0f} million parameters")
    try:
        model = inflate(loaded.model, params, dtype=dtype)
        if dtype.itemsize == 2 and model.device.type == "cpu":
            term.show_status("checking batch invariance, so that 16-bit texts can be compared")
            try:
                model = make_invariant.invariant(packing.pack(model))
            except UnsupportedModelError:
                if given is not None:
                    raise
                model = inflate(loaded.model, params, dtype=torch.float32)
    except ConfigError as problem:
        raise ConfigError("inflate", params, problem.remedy) from problem
    return replace(loaded, name=f"{loaded.name} model {PADDED} {params / 1e6:.0f}M parameters", model=model)

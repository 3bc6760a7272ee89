"""Models split over two fake devices, beside themselves on a CPU; see `fake_devices` for what an import does.

A case is a method, arguments of `generate` and a family, as in the tables below, joined by slashes.
"""

import sys
from pathlib import Path

import torch
from accelerate import dispatch_model
from fake_devices import NAME, Devices, OnDevice

sys.path.append(str(Path(__file__).parent.parent / "parity"))

from families import family

import lade
from lade import LookaheadConfig
from lade.serving.batch import EngineBatch
from lade.serving.capacity import row_bytes

torch.set_num_threads(1)  # those of the process that was forked are not here
FIRST = f"{NAME}:0"
METHODS = {"paper": LookaheadConfig(4, 3, 4), "budget": LookaheadConfig(budget=16), "default": "auto"}
ARGUMENTS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.9},
    "batch": {"rows": 2},
    "sampled-batch": {"rows": 2, "do_sample": True},
    "beams": {"num_beams": 2},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "chunks": {"prefill_chunk_size": 6},
}


def split(model):
    """The first half of the layers on one device; the second half, and what comes after, on the other."""
    decoder = model.get_decoder()
    base = next(name for name, module in model.named_modules() if module is decoder)
    children = dict(decoder.named_children())
    names = list(children)
    layers = next(name for name in names if isinstance(children[name], torch.nn.ModuleList))
    count = len(children[layers])
    places = {f"{base}.{layers}.{i}": f"{NAME}:{int(i >= count // 2)}" for i in range(count)}
    for name in names:
        if name != layers:
            comes_after = names.index(name) > names.index(layers) and "rotary" not in name
            places[f"{base}.{name}"] = f"{NAME}:{int(comes_after)}"
    return dispatch_model(model, {**places, "lm_head": f"{NAME}:1"}, main_device=FIRST, force_hooks=True)


def written(model, ids, lookahead, *, rows=1, **arguments):
    """Ids that are written after the same seed."""
    torch.manual_seed(3)
    ids = torch.cat([ids, ids.flip(1)]) if rows > 1 else ids
    output = lade.generate(model, ids, **{"max_new_tokens": 9, "do_sample": False, **arguments}, lookahead=lookahead)
    output = getattr(output, "sequences", output)
    return output.inner if isinstance(output, OnDevice) else output


def compared(case):
    """Whether a split model writes what it writes in one place: "equal", or what went wrong."""
    method, name, kind = case.split("/")
    arguments = ARGUMENTS[name]
    model, ids = family(kind).build(), torch.arange(1, 16)[None] * 7 % 61
    expected = written(model, ids, None, **arguments)
    with Devices():
        model = split(model)
        assert {str(parameter.device) for parameter in model.parameters()} == {FIRST, f"{NAME}:1"}
        try:
            ours = written(model, ids.to(FIRST), METHODS[method], **arguments)
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}".splitlines()[0]
    return "equal" if torch.equal(ours, expected) else f"{ours.tolist()} instead of {expected.tolist()}"


def rows_on_both():
    """Bytes of a token by device, and the slots of an engine by what is free on the first device and on the second."""
    with Devices():
        model = split(family("llama").build())
        plan, found = lade.supports(model).plan, []
        for free in ((2**20, 2**30), (2**30, 2**20), (2**20, 2**20)):
            getattr(torch, NAME).free = free
            batch = EngineBatch(model, plan, prefill_tokens=8, max_rows=2, max_tokens=None)
            found.append(batch.running.capacity.max_tokens)
        device_bytes, _ = row_bytes(batch._prefill_runner)
        return {"bytes": {str(device): size for device, size in device_bytes.items()}, "slots": found}

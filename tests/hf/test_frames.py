"""How deep the library is: frames of its own between the user's call and the model."""

import traceback
from pathlib import Path

import torch

import lade
from lade.testing import toy_model

PACKAGE = Path(lade.__file__).parent
IDS = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3]])
FRAMES = 8
"""One of them is there for models that several processes share."""


def test_from_generate_to_the_model_there_are_few_frames_of_our_own():
    model, stacks = toy_model(), []

    def note(*_):
        frames = traceback.extract_stack()
        stacks.append([frame.name for frame in frames if PACKAGE in Path(frame.filename).parents])

    model.register_forward_pre_hook(note)
    lade.generate(model, IDS, max_new_tokens=20, do_sample=False)
    _, *steps = stacks
    assert len(steps) > 3 and all(stack[1] == "generate" for stack in stacks)
    assert max(map(len, steps)) <= FRAMES, steps[0]

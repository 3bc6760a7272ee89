"""Captures without a device: calling again, and what would be wrong with a graph."""

import warnings

import pytest
import torch

from lade.errors import CaptureWarning
from lade.model.capture import Rerun
from lade.model.workspace import Workspace, setup_of, workspace_of
from lade.testing import toy_model


def test_a_rerun_returns_the_same_tensor_with_new_content():
    read = torch.tensor([1.0, 2.0])
    recording = Rerun().record(lambda: 2 * read, [read])
    first = recording.replay(lambda: 2 * read)
    assert first.tolist() == [2, 4]
    read += 1
    again = recording.replay(lambda: 2 * read)
    assert again is first and first.tolist() == [4, 6]


def test_a_tensor_that_moves_is_noticed():
    read = torch.ones(2)
    recording = Rerun().record(lambda: 2 * read, [read])
    recording.replay(lambda: 2 * read)
    with pytest.raises(RuntimeError, match="a tensor that was captured has moved"):
        recording.replay(lambda: read.set_(torch.ones(2)) * 2)


def test_a_result_of_another_shape_is_noticed():
    recording = Rerun().record(lambda: torch.ones(2), [])
    recording.replay(lambda: torch.ones(2))
    with pytest.raises(RuntimeError, match=r"a call returned \[1\] after \[2\]"):
        recording.replay(lambda: torch.ones(1))


def test_a_failure_is_told_with_what_went_wrong_first():
    workspace = Workspace(Rerun())
    try:
        try:
            raise RuntimeError("the model looked at a tensor\nat some place")
        finally:
            raise RuntimeError("the capture could not be ended")
    except RuntimeError as problem:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            workspace.fail("setup", problem)
    (warning,) = caught
    assert warning.category is CaptureWarning and str(warning.message).endswith("the model looked at a tensor")
    assert "ended" not in str(warning.message)


def test_a_failure_belongs_to_a_setup(monkeypatch):
    made = []
    monkeypatch.setattr("lade.model.workspace.CudaCapture", lambda device: made.append(device) or Rerun())
    model, device = toy_model(), torch.device("cuda")
    workspace = workspace_of(model, device)
    assert workspace_of(model, device) is workspace
    with pytest.warns(CaptureWarning):
        workspace.fail(setup_of(model), RuntimeError("no"))
    assert workspace_of(model, device) is workspace
    model.set_attn_implementation("eager")
    assert workspace_of(model, device) is not workspace and made == [device] * 2


def test_a_setup_is_the_weights_and_what_computes_with_them():
    model = toy_model()
    setup = setup_of(model)
    assert setup == setup_of(model) != setup_of(toy_model())
    for change in (
        lambda: model.set_attn_implementation("eager"),
        model.train,
        lambda: torch.use_deterministic_algorithms(True),
        lambda: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
    ):
        before = setup_of(model)
        change()
        assert setup_of(model) != before
    torch.use_deterministic_algorithms(False)

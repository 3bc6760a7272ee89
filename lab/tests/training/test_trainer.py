from dataclasses import replace

import pytest
import torch

from lade.errors import InputError
from training.trainer import Trainer


def _steps(trainer, count):
    return [trainer.step().item() for _ in range(count)]


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(corpus, plan, shape, tmp_path):
    whole = Trainer(corpus, plan, shape)
    losses = _steps(whole, 10)
    first = Trainer(corpus, plan, shape)
    _steps(first, 7)  # short rows alone; then short rows and loops, then long rows and loops
    first.save(tmp_path / "c.pt")
    _steps(first, 1)  # lost with the process that is killed here
    second = Trainer(corpus, plan, shape)
    second.resume(tmp_path / "c.pt")
    assert _steps(second, 3) == losses[7:]
    assert second.done
    for mine, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert second.progress.long_rows == 2 * 2
    assert second.progress.short_rows == 8 * 4


@pytest.mark.slow
def test_training_lowers_the_loss(corpus, plan, shape):
    trainer = Trainer(corpus, replace(plan, total_tokens=6400), shape)
    losses = _steps(trainer, 60)
    assert sum(losses[-5:]) < sum(losses[:5]) - 1.0


def test_a_kill_while_saving_leaves_the_old_checkpoint(corpus, plan, shape, tmp_path, monkeypatch):
    trainer, path = Trainer(corpus, plan, shape), tmp_path / "c.pt"
    trainer.save(path)
    before = path.read_bytes()

    def half(state, target):
        target.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        trainer.save(path)
    assert path.read_bytes() == before


def test_the_total_may_change_until_the_tail_begins(corpus, plan, shape, tmp_path):
    trainer, path = Trainer(corpus, plan, shape), tmp_path / "c.pt"
    _steps(trainer, 6)
    trainer.save(path)
    Trainer(corpus, replace(plan, total_tokens=6400), shape).resume(path)
    with pytest.raises(InputError, match=r"total_tokens=448: 384 tokens are read .* use 549 or more"):
        Trainer(corpus, replace(plan, total_tokens=448), shape).resume(path)
    _steps(trainer, 2)
    trainer.save(path)
    with pytest.raises(InputError, match="tail of 640 has begun"):
        Trainer(corpus, replace(plan, total_tokens=6400), shape).resume(path)


def test_another_seed_or_shape_and_a_broken_checkpoint_are_refused(corpus, plan, shape, tmp_path):
    path = tmp_path / "c.pt"
    Trainer(corpus, plan, shape).save(path)
    with pytest.raises(InputError, match="seed=9: the run was begun with 1"):
        Trainer(corpus, replace(plan, seed=9), shape).resume(path)
    with pytest.raises(InputError, match="use a fresh work folder"):
        Trainer(corpus, plan, replace(shape, layers=1)).resume(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"cannot be read .*; remove it"):
        Trainer(corpus, plan, shape).resume(path)
    torch.save({"weights": 1}, path)
    with pytest.raises(InputError, match="not one of this trainer"):
        Trainer(corpus, plan, shape).resume(path)


def test_the_rate_rises_stays_and_falls(plan):
    rates = [plan.rate(tokens) for tokens in range(0, plan.total_tokens, plan.batch_tokens)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[2:7] == [1.0] * 5
    assert rates[8:] == sorted(rates[8:], reverse=True)
    assert 0 < rates[-1] <= 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_tokens": 0}, "total_tokens=0: must be at least 1"),
        ({"decay_share": 1.5}, "decay_share=1.5: must lie between 0 and 1"),
        ({"loop_share": -0.5}, "loop_share=-0.5: must lie between 0 and 1"),
        ({"batch_tokens": 100}, "batch_tokens=100: must be a multiple of rows of 16 and 32"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(plan, change, message):
    with pytest.raises(InputError, match=message):
        replace(plan, **change)

"""The original library's API."""

import functools

import pytest
import torch
from same_as_plain import Listener
from transformers import GenerationMixin

import lade
from lade.hf import legacy_api as compat
from lade.testing import toy_model

IDS = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3]])


def sample():
    """What the original library replaces, and so does this one."""
    return GenerationMixin._sample


def lookahead():
    """What `config_lade` has set."""
    return compat._settings.lookahead


ORIGINAL = sample()


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.delenv("USE_LADE", raising=False)
    monkeypatch.setattr(compat, "_settings", compat._Settings())
    yield
    lade.restore_all()
    assert sample() is ORIGINAL


@pytest.fixture
def passes():
    """A model and the number of its forward passes."""
    model, counted = toy_model(), []
    model.register_forward_hook(lambda *_: counted.append(1))
    return model, counted


@pytest.fixture
def switch(monkeypatch):
    """Sets the variable."""
    return functools.partial(monkeypatch.setenv, "USE_LADE")


def augmented():
    lade.augment_all()
    lade.config_lade(LEVEL=5, WINDOW_SIZE=7, GUESS_SET_SIZE=7, DEBUG=0)


def test_word_for_word_it_accelerates_greedy_generate(passes, switch):
    model, counted = passes
    plain = model.generate(IDS, max_new_tokens=200)
    assert len(counted) == 200
    counted.clear()
    augmented()
    switch("1")
    assert torch.equal(model.generate(IDS, max_new_tokens=200), plain)
    assert len(counted) < 150


@pytest.mark.parametrize("value", [None, "0", ""])
def test_without_the_variable_nothing_changes(passes, switch, value):
    model, counted = passes
    augmented()
    if value is not None:
        switch(value)
    model.generate(IDS, max_new_tokens=30)
    assert len(counted) == 30


def test_sampling_stays_the_same_switched_off_and_accelerated(passes, switch):
    """The original library turned it into greedy decoding when it was switched off."""
    model, counted = passes
    texts, steps = [], []
    for prepare in (list, augmented, lambda: switch("1")):
        prepare()
        counted.clear()
        torch.manual_seed(7)
        texts.append(model.generate(IDS, max_new_tokens=150, do_sample=True, temperature=0.1))
        steps.append(len(counted))
    assert torch.equal(texts[1], texts[0]) and torch.equal(texts[2], texts[0])
    assert steps[:2] == [150, 150] and steps[2] < 140


def test_what_cannot_be_served_is_decoded_plainly_with_a_word(passes, switch):
    model, _ = passes
    arguments = {"max_new_tokens": 30, "guidance_scale": 1.5}
    plain = model.generate(IDS, **arguments)
    lade.augment_all()
    switch("1")
    with pytest.warns(lade.FallbackWarning, match="guidance_scale=1.5"):
        assert torch.equal(model.generate(IDS, **arguments), plain)


def test_restore_all_undoes_the_patch_however_often_it_was_made(passes, switch):
    model, counted = passes
    lade.augment_all()
    lade.augment_all()
    lade.restore_all()
    assert sample() is ORIGINAL
    switch("1")
    model.generate(IDS, max_new_tokens=30)
    assert len(counted) == 30


def test_debug_prints_the_summary_and_the_log_adds_up(passes, switch, capsys, tmp_path):
    model, counted = passes
    lade.augment_all()
    lade.config_lade(LEVEL=4, WINDOW_SIZE=5, GUESS_SET_SIZE=5, DEBUG=1)
    switch("1")
    for _ in range(2):
        model.generate(IDS, max_new_tokens=60)
    assert f"Generated tokens:  60 Total steps:  {len(counted) // 2}" in capsys.readouterr().out
    lade.save_log(tmp_path / "log.pt")
    assert torch.load(tmp_path / "log.pt") == [[60, len(counted) // 2]] * 2
    lade.log_history(clear=True)
    assert f"OVERALL GEN:  120  STEPS:  {len(counted)} " in capsys.readouterr().out
    lade.log_history()
    assert "OVERALL GEN:  0  STEPS:  0  AVG COMPRESS RATIO:  0" in capsys.readouterr().out


def test_a_streamer_has_each_token_before_the_next_criterion_is_called(passes, switch):
    model, counted = passes

    class Telling(Listener):
        def put(self, value):
            calls.append(value.tolist())

    def criterion(input_ids, scores, **more):
        calls.append(input_ids.shape)
        return torch.zeros(1, dtype=torch.bool)

    books = []
    for use_lade in "01":
        augmented()
        switch(use_lade)
        books.append(calls := [])
        model.generate(IDS, max_new_tokens=100, streamer=Telling(), stopping_criteria=[criterion])
    assert books[0] == books[1] and len(counted) < 200


def test_the_log_is_bounded_and_its_sums_are_whole(capsys, tmp_path):
    count, stats = compat.LOGGED_GENERATIONS + 2, lade.Stats(generations=1)
    for stats.new_tokens in range(count):
        compat._log(stats)
    lade.save_log(tmp_path / "log.pt")
    assert torch.load(tmp_path / "log.pt") == [[tokens, 1] for tokens in range(2, count)]
    lade.log_history()
    assert f"OVERALL GEN:  {count * (count - 1) // 2}  STEPS:  {count} " in capsys.readouterr().out
    with pytest.raises(lade.ConfigError, match="create it first"):
        lade.save_log(tmp_path / "missing" / "log.pt")


def test_settings_that_are_left_out_or_refused_keep_their_value():
    lade.config_lade(LEVEL=3, WINDOW_SIZE=9)
    assert not lookahead().prompt_ngrams, "until it is asked for"
    lade.config_lade(GUESS_SET_SIZE=2, POOL_FROM_PROMPT=1)
    with pytest.raises(lade.ConfigError, match="ngram=1"):
        lade.config_lade(LEVEL=1)
    lade.config_lade(ALWAYS_FWD_ONE=1, SPLIT_FLAG=0, DIST_WORKERS=1, USE_FLASH=0, backend="gloo")  # no warning
    assert lookahead() == lade.LookaheadConfig(9, 3, 2, prompt_ngrams=True)


@pytest.mark.parametrize("setting", [{"ALWAYS_FWD_ONE": 0}, {"SPLIT_FLAG": 1}, {"DIST_WORKERS": 2}, {"USE_FLASH": 1}])
def test_what_is_not_there_says_so(setting):
    (name,) = setting
    with pytest.warns(UserWarning, match=f"{name}=.* is not available yet: "):
        lade.config_lade(**setting)

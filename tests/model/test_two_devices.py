"""A model whose layers lie on two devices, as `device_map="auto"` places those that one GPU has no room for."""

import os

import pytest
from forked import in_fork

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
DEFAULT = ["default/greedy/llama", "paper/greedy/llama", "default/sampled-batch/llama"]
METHODS = ("paper", "budget", "default")
OTHERS = ("gpt2", "gemma3_text", "qwen3_moe", "bloom", "mistral-window", "deepseek_v3")


def compared(cases):
    """What came out, by case. The fake devices change torch for good, so that is done in a process of its own."""

    def compare():
        import split_models

        return {case: split_models.compared(case) for case in cases}

    return in_fork(compare, seconds=100)


@pytest.mark.slow
def test_a_split_model_writes_what_it_writes_in_one_place():
    assert compared(DEFAULT) == dict.fromkeys(DEFAULT, "equal")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["greedy", "sampled", "batch", "sampled-batch", "beams", "scores", "chunks"])
def test_with_any_arguments_and_method(arguments):
    cases = [f"{method}/{arguments}/llama" for method in METHODS if (method, arguments) != ("budget", "beams")]
    assert compared(cases) == dict.fromkeys(cases, "equal")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name):
    cases = [f"default/{arguments}/{name}" for arguments in ("greedy", "batch")] + [f"paper/sampled/{name}"]
    assert compared(cases) == dict.fromkeys(cases, "equal")


def test_an_engine_has_room_where_both_devices_have_it():
    def found():
        import split_models

        return split_models.rows_on_both()

    rows = in_fork(found, seconds=100)
    first, second = rows["bytes"].values()
    assert rows["slots"] == [int(0.8 / 2.75 * 2**20 / size) for size in (first, second, max(first, second))]
    assert list(rows["bytes"]) == ["fake:0", "fake:1"] and first == second

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pretend import use_threads
from spies import watched

import lade
from lade import native
from lade.decoding.drafting.step_cost import StepCost
from lade.files import Records
from lade.model.runner import EagerRunner
from lade.model.supports import supports
from lade.testing import toy_model
from lade.tuning import cost_cache as profile


def runner_of(model):
    return EagerRunner(model, supports(model).require(), model.generation_config)


def moved(cost, pass_s=20e-3):
    """Let passes of 16 tokens take so long."""
    for _ in range(30):
        cost.observe(16, pass_s)
    cost.refresh()


def reloaded():
    """The curve of such a model as another process finds it."""
    twin = toy_model("llama", dtype=torch.float32, seed=5)
    return profile.step_cost_for(twin, runner_of(twin))


def saved(folder):
    """The files of curves."""
    return list(folder.glob("step-cost/*"))


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def model():
    return toy_model("llama", dtype=torch.float32)


@pytest.fixture
def measured(monkeypatch):
    """The batches that were measured; a pass takes 10 ms whatever its size."""
    batches = []

    def measure(runner, *, vocabulary, batch):
        batches.append(batch)
        return StepCost.of({1: [10e-3] * 9, 128: [10e-3] * 9}, measured_at=time.time())

    monkeypatch.setattr(profile, "measure_step_cost", measure)
    return batches


def test_a_model_is_measured_once_for_each_power_of_two_of_rows(model, measured):
    cost = profile.step_cost_for(model, runner_of(model))
    assert profile.step_cost_for(model, runner_of(model)) is cost
    assert measured == [1]
    loaded = reloaded()
    assert loaded is not cost and loaded.to_json() == cost.to_json()
    assert measured == [1]
    costs = {batch: profile.step_cost_for(model, runner_of(model), batch=batch) for batch in range(1, 10)}
    assert measured == [1, 2, 4, 8, 16]
    assert costs[5] is costs[8] and costs[2] is not costs[1]


@pytest.mark.parametrize(("compiled", "said"), [(False, "a second or two"), (True, "minutes, as torch.compile")])
def test_it_says_how_long_measuring_takes(model, measured, caplog, compiled, said):
    caplog.set_level("INFO", "lade")
    if compiled:
        model.compile(backend="eager")
    profile.step_cost_for(model, runner_of(model))
    assert "measuring the step cost" in caplog.messages[0] and said in caplog.messages[0]


@pytest.mark.measured_cost
def test_what_drafting_was_worth_is_known_to_the_next_call_and_to_that_kind_of_text_alone(measured, monkeypatch):
    """Two calls with one model: the second begins with what the first has learned, and ends with more."""
    ids, model = torch.tensor([[1, 2, 3]]), toy_model("llama", dtype=torch.float32, seed=3)
    cost, known = profile.step_cost_for(model, runner_of(model)), []
    for arguments in ({}, {}, {"do_sample": True, "temperature": 0.7}):
        lade.generate(model, input_ids=ids, max_new_tokens=20, eos_token_id=None, **arguments)
        kinds = ("greedy", "sampled at 0.7", "sampled at 1.0")
        known.append([cost.state(kind).curve.steps[0] for kind in kinds])
    (greedy, drawn, other), (again, _, _), (still, now_drawn, _) = known
    assert still == again > greedy > drawn == other
    assert now_drawn > drawn


def test_what_others_draw_while_it_is_measured_is_not_taken_back(model, measured, monkeypatch):
    def draw_beside(*_, **__):
        with ThreadPoolExecutor() as other:
            return other.submit(torch.rand, 5).result()

    drawn = watched(monkeypatch, profile, "measure_step_cost", draw_beside)
    torch.manual_seed(3)
    expected = torch.rand(10)
    torch.manual_seed(3)
    profile.step_cost_for(model, runner_of(model))
    assert measured and torch.equal(torch.cat([*drawn, torch.rand(5)]), expected)


def test_what_changes_the_cost_is_measured_again(model, measured, monkeypatch):
    class PackedLinear(torch.nn.Linear):
        pass

    def again():
        count = len(measured)
        profile.step_cost_for(model, runner_of(model))
        return len(measured) > count

    assert again() and not again()
    model.set_attn_implementation("eager")
    assert again() and not again()
    model.to(torch.float64)
    assert again() and not again()
    model.lm_head.__class__ = PackedLinear
    assert again() and not again()
    use_threads(monkeypatch, 77)
    assert again() and not again()
    for owner, name, other in (
        (torch.backends.cpu, "get_cpu_capability", lambda: "another one"),
        (profile, "__version__", "0.0.0"),
        (profile.transformers, "__version__", "0.0.0"),
        (profile, "processor_name", lambda: "another machine"),
    ):
        monkeypatch.setattr(owner, name, other)
        assert again() and not again(), name


def key(model):
    return profile.key_of(model, runner_of(model))


def test_another_shape_is_another_key_and_so_is_another_machine(model, monkeypatch, tmp_path):
    own = key(model)
    assert own == key(toy_model("llama", dtype=torch.float32, seed=9))
    others = [toy_model("qwen3", dtype=torch.float32), toy_model("llama", dtype=torch.float32, vocabulary=64)]
    assert all(key(other) != own for other in others)
    assert own["dtype"] == "float32" and own["attention"] == "sdpa" and own["batch"] == 1
    assert own["parameters"] == model.num_parameters() and own["runner"] == "EagerRunner"
    assert key(model)["devices"]
    assert native.processor_name(tmp_path / "none")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus 3: fast\n")
    assert native.processor_name(tmp_path / "cpuinfo") == "Abacus 3: fast"
    monkeypatch.setattr(profile, "processor_name", lambda: "Abacus 3")
    assert key(model)["devices"][0].startswith("Abacus 3, ")


def test_threads_wait_for_a_measurement_that_is_going_on(model, measured, monkeypatch):
    """Passes made at the same time would be measured as slow ones."""
    start = threading.Barrier(4)

    def cost_for(number):
        start.wait(10)
        return profile.step_cost_for(model, runner_of(model))

    watched(monkeypatch, profile, "measure_step_cost", lambda *_, **__: time.sleep(0.05))
    with ThreadPoolExecutor(4) as pool:
        costs = list(pool.map(cost_for, range(4)))
    assert measured == [1] and len(set(map(id, costs))) == 1


def test_a_curve_may_be_measured_while_another_thread_saves(model, measured, monkeypatch, tmp_path):
    moved(profile.step_cost_for(model, runner_of(model)))

    def measure_beside(*_):
        return len(measured) == 1 and profile.step_cost_for(model, runner_of(model), batch=2)

    writing = watched(monkeypatch, Records, "save", measure_beside)
    profile.save_refreshed(model)
    assert measured == [1, 2] and len(writing) == 2 and len(saved(tmp_path)) == 2


def test_a_curve_that_steps_have_moved_is_saved_at_the_end(model, measured, monkeypatch):
    cost = profile.step_cost_for(model, runner_of(model))
    path = profile.RECORDS.path_of(profile.key_of(model, runner_of(model)))
    before = path.read_text()
    profile.save_refreshed(model)
    cost.observe(16, 10.1e-3)
    cost.refresh()
    profile.save_refreshed(model)
    assert path.read_text() == before, "nothing worth saving"
    moved(cost)
    profile.save_refreshed(model)
    assert path.read_text() != before
    assert reloaded().table == cost.table
    path.unlink()
    later(monkeypatch)
    profile.save_refreshed(model)
    assert not path.exists(), "it has not moved since"


def later(monkeypatch):
    """From now on it is as many seconds later as lie between two times that a curve is saved."""
    now = profile.monotonic
    monkeypatch.setattr(profile, "monotonic", lambda: now() + profile.SAVE_EVERY_S)


def test_a_curve_that_goes_on_moving_is_saved_now_and_then(model, measured, monkeypatch):
    """A server of short answers would write a file after each of them."""
    cost = profile.step_cost_for(model, runner_of(model))
    path, texts = profile.RECORDS.path_of(profile.key_of(model, runner_of(model))), []
    for pass_s in (20e-3, 40e-3, 80e-3):
        moved(cost, pass_s)
        if pass_s > 40e-3:
            later(monkeypatch)
        profile.save_refreshed(model)
        texts.append(path.read_text())
    assert texts[0] == texts[1] != texts[2]
    assert reloaded().table == cost.table


def test_a_better_curve_is_used_and_saved_at_once_and_none_before(model, measured, tmp_path):
    profile.save_refreshed(model)
    assert not saved(tmp_path), "a model that was never measured has nothing to save"
    better = StepCost.of({1: [1.0]}, measured_at=time.time())
    assert profile.use(model, key(model), better)
    assert profile.step_cost_for(model, runner_of(model)) is better
    assert not measured and len(saved(tmp_path)) == 1


def test_curves_go_with_their_model(measured):
    model = toy_model("llama")
    cost = weakref.ref(profile.step_cost_for(model, runner_of(model)))
    del model
    gc.collect()
    assert cost() is None


def test_it_measures_a_real_model_and_leaves_its_text_as_it_was(model):
    prompt = torch.tensor([[1, 2, 3, 4]])
    before = lade.generate(model, input_ids=prompt, max_new_tokens=20)
    cost = profile.step_cost_for(model, runner_of(model))
    assert 0 < cost.seconds(1) <= cost.seconds(64)
    assert torch.equal(lade.generate(model, input_ids=prompt, max_new_tokens=20), before)


def test_what_is_measured_on_a_busy_machine_is_measured_again_once_it_is_quiet(model, measured, monkeypatch, tmp_path):
    said = ["The machine is busy"]
    monkeypatch.setattr(profile, "contention_now", lambda threads: said[-1])
    cost = profile.step_cost_for(model, runner_of(model))
    assert profile.step_cost_for(model, runner_of(model)) is cost and measured == [1]
    said.append("")
    moved(cost)
    profile.save_refreshed(model)
    assert not saved(tmp_path)
    kept = profile.step_cost_for(model, runner_of(model))  # it is quiet now
    assert kept is not cost and kept.state("greedy") is cost.state("greedy"), "texts are as before"
    assert profile.step_cost_for(model, runner_of(model)) is kept
    (file,) = saved(tmp_path)
    before = file.read_text()
    said.append("The machine is busy")
    moved(kept)
    profile.save_refreshed(model)
    assert file.read_text() == before and measured == [1, 1]

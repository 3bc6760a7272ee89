"""The benchmark on toy models: fair, exact, and resumable at any moment."""

import copy
import hashlib
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from bench_toys import Chatty, Letters, models, workload
from spies import answered, failing, watched

import lade
from lade.errors import ConfigError, InputError, UnsupportedError
from lade.memory import Memory
from lade.stats import Stats
from lade.testing import toy_model
from lade_lab.harness import experiment as module
from lade_lab.harness.arms import Completion, Meter, OwnArm, Pass, TransformersArm, digest
from lade_lab.harness.benchmark import commit_of, prepare
from lade_lab.harness.experiment import jobs_of
from lade_lab.harness.methods import parse_all
from lade_lab.results import Results, Settings

TEXTS = [["HELLO"], ["WORLD"], ["HELLO"]]
NEW = 16
GREEDY = Settings(NEW)
ALL = [
    "hf,hf-prompt-lookup,plain,jacobi,lookahead=3,3,3,adaptive=12,adaptive-warm=12",
    "prompt-lookup=8,suffix=8,token-recycling=8",
]
TIMES = ("seconds", "prefill_s", "decode_s", "forward_s")


def prepared(methods=ALL, settings=GREEDY, workloads=None, tokenizer=None, toy=None, **options):
    toy = toy or models()
    texts = parse_all(methods, sampling=settings.temperature is not None, draft=toy.draft is not None)
    return prepare(toy, tokenizer or Letters(), workloads or [workload(*TEXTS)], texts, settings, **options)


def finished(experiment):
    for _ in experiment:
        pass
    return experiment.results


def timeless(results):
    """The samples without what a clock says."""
    return [replace(sample, **dict.fromkeys(TIMES, 0.0)) for sample in results.samples]


def plain_answer(model, text):
    ids = torch.tensor([Letters()(text)["input_ids"]])
    return model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def results():
    experiment = prepared()
    experiment.warm_up()
    return finished(experiment)


@pytest.mark.slow
def test_all_methods_write_the_same_and_all_of_it_is_recorded(results):
    assert results.complete and results.mismatches == [] and results.reference == "hf"
    names = [method.name for method in results.methods]
    assert [(s.prompt, s.method) for s in results.samples] == [(f"p{n}", name) for n in range(3) for name in names]
    for sample in results.samples:
        reference = next(s for s in results.samples if (s.prompt, s.method) == (sample.prompt, "hf"))
        assert (sample.output_sha256, sample.prompt_sha256) == (reference.output_sha256, reference.prompt_sha256)
        assert (sample.workload, sample.turn, sample.seed, sample.repeat) == ("toys", 0, 0, 0)
        assert (sample.new_tokens, sample.prompt_tokens) == (NEW, 5)
        assert sample.steps == len(sample.step_tokens) == len(sample.accepted)
        assert sum(sample.accepted) == NEW - 1 or sample.method == "hf-prompt-lookup"
        assert 0 < sample.forward_s < sample.decode_s < sample.seconds
        assert sample.prefill_s + sample.decode_s == pytest.approx(sample.seconds, rel=1e-3)
        assert 0 < sample.distinct_4grams <= 1


def test_the_hashes_are_of_ids_as_little_endian_int64(results):
    assert results.samples[0].prompt_sha256 == digest(Letters()("HELLO")["input_ids"])
    assert digest([1, 258]) == hashlib.sha256(bytes([1, *[0] * 7, 2, 1, *[0] * 6])).hexdigest()
    assert results.samples[0].output_sha256 == digest(plain_answer(models().plain, "HELLO"))


def test_plain_methods_feed_one_token_a_step_and_sources_are_counted_by_place(results):
    for method in ("hf", "plain"):
        for sample in results.of(method):
            assert sample.step_tokens == sample.accepted == [1] * (NEW - 1)
    assert all(fed == 9 for sample in results.of("jacobi") for fed in sample.step_tokens)
    assert any(fed > 1 for sample in results.of("adaptive 12") for fed in sample.step_tokens)
    for method in results.methods:
        for sample in results.of(method.name):
            if method.kind.startswith("hf"):
                assert sample.sources == []
                continue
            for place, counts in enumerate(sample.sources):
                assert sum(counts.values()) == sum(accepted > place for accepted in sample.accepted)
            assert len(sample.sources) == max(sample.accepted)
    assert any("memory" in place for sample in results.of("adaptive 12") for place in sample.sources)


def test_a_kept_memory_helps_with_a_prompt_seen_before_in_the_same_workload_seed_and_repeat_alone(results):
    first, _, again = results.of("adaptive-warm 12")
    assert again.steps < first.steps, "the third prompt is the first again"
    assert first.steps == next(results.of("adaptive 12")).steps, "it begins empty, whatever the warm-up has seen"
    settings = Settings(NEW, repeats=2)
    toys = [workload(*TEXTS), workload(*TEXTS, name="others")]
    found = finished(prepared(["adaptive-warm=12"], settings, toys))
    steps = [sample.steps for sample in found.samples]
    assert steps == [sample.steps for sample in results.of("adaptive-warm 12")] * 4


def test_the_record_says_what_ran_and_what_passes_cost(results, tmp_path):
    (curve,) = results.step_curves
    assert (curve.packed, curve.cached, curve.sizes) == (False, 5 + NEW // 2, [1, 2, 4, 8, 16, 32])
    assert all(seconds > 0 for size in curve.seconds for seconds in size) and len(curve.seconds) == 6
    assert results.environment.threads == torch.get_num_threads()
    assert {"python", "torch", "transformers", "lookahead-decoding"} <= results.environment.versions.keys()
    assert results.environment.device and results.environment.platform
    assert (results.model.name, results.model.dtype) == ("toy", "float64")
    assert [method.packed for method in results.methods] == [False] * 10
    results.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == results


@pytest.mark.slow
def test_packed_weights_are_for_this_librarys_methods():
    model = models(dtype=torch.float32)
    packed = lade.pack(copy.deepcopy(model.plain), min_weights=1)
    experiment = prepared(["hf,hf-prompt-lookup,plain,jacobi,adaptive=4"], toy=replace(model, packed=packed))
    experiment.warm_up()
    with Meter(packed) as ours, Meter(model.plain) as theirs:
        results = finished(experiment)
    assert [method.packed for method in results.methods] == [False, False, True, True, True]
    named = {method.name: method.packed for method in results.methods}
    steps = [sum(s.steps + 1 for s in results.samples if named[s.method] == packed) for packed in (True, False)]
    assert [len(ours.passes), len(theirs.passes) - len(results.mismatches)] == steps
    assert [curve.packed for curve in results.step_curves] == [False, True]
    assert all(mismatch.near_tie for mismatch in results.mismatches)


def test_the_references_of_an_enabled_model_are_plain():
    toy = models()
    expected = finished(prepared(["hf,plain"], toy=toy))
    stats = lade.Stats()
    lade.enable(toy.plain, stats=stats)
    found = finished(prepared(["hf,plain"], toy=toy))
    digests = [[sample.output_sha256 for sample in results.samples] for results in (expected, found)]
    assert digests[0] == digests[1] and stats == lade.Stats()
    assert all(fed == 1 for sample in found.of("hf") for fed in sample.step_tokens)


def test_methods_take_turns_in_coming_first(monkeypatch):
    called = []
    for kind in (TransformersArm, OwnArm):
        watched(monkeypatch, kind, "complete", lambda arm, *_: called.append(arm.method.name))
    finished(prepared(["hf,plain,jacobi"], workloads=[workload(*TEXTS, ["MORE", "AND MORE"])]))
    a, b, c = "hf", "plain", "jacobi"
    assert called == [a, b, c, b, c, a, c, a, b, a, b, c, b, c, a], "in the second turn of a conversation too"


def test_a_wrong_answer_is_found_in_each_prompt_and_turn(monkeypatch):
    def spoil(completion, arm, *_):
        if arm.method.name == "jacobi":
            completion.tokens[5] = (completion.tokens[5] + 1) % 48

    answered(monkeypatch, OwnArm, "complete", spoil)
    experiment = prepared(["hf,plain,jacobi"], workloads=[workload(["HELLO", "AND"], ["WORLD"])])
    results = finished(experiment)
    found = [(m.prompt, m.turn, m.method, m.place) for m in results.mismatches]
    assert found == [(prompt, turn, "jacobi", 5) for prompt, turn in (("p0", 0), ("p0", 1), ("p1", 0))]
    assert all(m.reference == "hf" and not m.near_tie and m.ulps > 64 for m in results.mismatches)


@pytest.mark.slow
def test_what_draws_otherwise_is_not_compared():
    settings = Settings(NEW, temperature=1.5, seeds=[3, 4])
    toy = replace(models(), draft=toy_model(vocabulary=48, seed=1))
    results = finished(prepared([*ALL, "hf-assisted"], settings, toy=toy))
    assert results.mismatches == []
    compared = {method.name: method.compared for method in results.methods}
    assert [name for name in compared if not compared[name]] == ["hf-prompt-lookup", "hf-assisted"]
    texts = {}
    for sample in results.samples:
        if compared[sample.method]:
            texts.setdefault((sample.prompt, sample.seed), set()).add(sample.output_sha256)
    assert len(texts) == 6 and all(len(found) == 1 for found in texts.values())
    assert texts["p0", 3] != texts["p0", 4]
    assert texts["p0", 3] == texts["p2", 3], "each answer begins with its seed"
    others = {sample.output_sha256 for sample in results.of("hf-prompt-lookup")}
    assert others - set.union(*texts.values()), "if they were equal, they should be compared"


def test_of_an_assisted_method_the_target_models_passes_count():
    toy = models()
    toy = replace(toy, draft=toy.plain.__class__(copy.deepcopy(toy.plain.config)).to(torch.float64))
    toy.draft.load_state_dict(toy.plain.state_dict())
    toy.draft.generation_config.assistant_confidence_threshold = 0.0
    toy.draft.generation_config.num_assistant_tokens = 3
    results = finished(prepared(["hf,hf-assisted"], workloads=[workload(["HELLO"])], toy=toy))
    assert results.mismatches == []
    (sample,) = results.of("hf-assisted")
    # A perfect draft: three guesses and one more token a pass, four of them in prefill.
    assert sample.step_tokens == sample.accepted == [4, 4, 4]


@pytest.mark.parametrize(("tokenizer", "chat"), [(Chatty, True), (Chatty, False), (Letters, True)])
def test_the_second_turn_is_asked_behind_the_references_answer_and_the_chat_template_is_for_chats(tokenizer, chat):
    letters, toy = Letters(), models()
    asked = [workload(["HELLO", "WORLD"], chat=chat)]
    results = finished(prepared(["plain,hf,adaptive=8"], workloads=asked, toy=toy, tokenizer=tokenizer()))
    templated = tokenizer is Chatty and chat
    first = "UHELLOA" if templated else "HELLO"
    reply = letters.decode(plain_answer(toy.plain, first))
    second = letters(f"UHELLOA{reply}UWORLDA" if templated else f"HELLO{reply}\n\nWORLD")["input_ids"]
    prompts = [(turn, digest(ids)) for turn, ids in enumerate([letters(first)["input_ids"], second])]
    assert [(s.turn, s.prompt_sha256) for s in results.samples] == [prompts[0]] * 3 + [prompts[1]] * 3


def test_ignoring_the_end_of_the_text():
    toy = models()
    toy.plain.generation_config.eos_token_id = plain_answer(toy.plain, "HELLO")[3]
    ended = finished(prepared(workloads=[workload(["HELLO"])], toy=toy))
    assert {sample.new_tokens for sample in ended.samples} < set(range(1, 5)) and ended.mismatches == []
    whole = finished(prepared(settings=Settings(NEW, ignore_eos=True), workloads=[workload(["HELLO"])], toy=toy))
    assert {sample.new_tokens for sample in whole.samples} == {NEW} and whole.mismatches == []


def long_run(folder, resume=False, **options):
    options = {"methods": ["adaptive-warm=12"], "settings": Settings(NEW, repeats=2)} | options
    return prepared(workloads=[workload(*TEXTS)], folder=folder, resume=resume, **options)


class Killed(BaseException):
    """Ends a run where no handler looks."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return finished(long_run(tmp_path_factory.mktemp("whole")))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("at", [1, 3, 4, 6])
@pytest.mark.parametrize(("owner", "after"), [(Results, False), (Results, True), (Memory, False), (Memory, True)])
def test_whenever_it_is_killed_it_goes_on_as_if_it_had_not_been(owner, after, at, uninterrupted, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, owner, "save", Killed, calls={at}, after=after)
        with pytest.raises(Killed):
            finished(long_run(tmp_path))
    experiment = long_run(tmp_path, resume=True)
    assert experiment.done == (at if (owner, after) == (Results, True) else at - 1)
    results = finished(experiment)
    assert timeless(results) == timeless(uninterrupted)
    assert results.complete
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"], "memories have done their work"


def test_ctrl_c_amid_an_answer_and_twice(uninterrupted, tmp_path, monkeypatch):
    for at, done in ((3, 2), (2, 3)):
        with monkeypatch.context() as patch:
            failing(patch, OwnArm, "complete", KeyboardInterrupt, calls={at})
            with pytest.raises(KeyboardInterrupt):
                finished(long_run(tmp_path, resume=True))
        assert long_run(tmp_path, resume=True).done == done
    assert timeless(finished(long_run(tmp_path, resume=True))) == timeless(uninterrupted)


def test_step_curves_are_measured_once(tmp_path, monkeypatch):
    experiment = long_run(tmp_path)
    experiment.warm_up()
    next(iter(experiment))
    again = long_run(tmp_path, resume=True)
    measured = watched(monkeypatch, module, "step_curve")
    again.warm_up()
    assert not measured
    assert again.results.step_curves == experiment.results.step_curves != []


def test_going_on_on_other_terms_is_refused(tmp_path):
    next(iter(long_run(tmp_path)))
    for message, options in [
        (r"settings.max_new_tokens is 9 here, but 16", {"settings": Settings(9, repeats=2)}),
        (r"methods is .* here, but", {"methods": ["plain,adaptive-warm=12"]}),
        (r'model.dtype is "float32" here, but "float64"', {"toy": models(dtype=torch.float32)}),
    ]:
        with pytest.raises(InputError, match=message):
            long_run(tmp_path, resume=True, **options)
    with pytest.raises(InputError, match="already has results: continue with --resume"):
        long_run(tmp_path)
    assert long_run(tmp_path, resume=True).done == 1


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be created"):
        long_run(tmp_path / "file" / "folder")
    with pytest.raises(InputError, match="is a file"):
        long_run(tmp_path / "file")


def test_a_memory_that_was_removed(tmp_path):
    next(iter(long_run(tmp_path)))
    (file,) = tmp_path.glob("*.memory")
    file.unlink()
    with pytest.raises(InputError, match="memory of adaptive-warm 12 after 1 prompts is missing"):
        next(iter(long_run(tmp_path, resume=True)))


def test_results_that_are_not_of_these_prompts(tmp_path):
    results = finished(long_run(tmp_path))
    samples = list(results.samples)
    for kept in (samples[1:], samples * 2, samples[::-1]):
        replace(results, samples=kept).save(tmp_path / "results.json")
        with pytest.raises(InputError, match="is none of the prompt that comes next"):
            long_run(tmp_path, resume=True)


def test_run_from_python(tmp_path):
    model = toy_model(vocabulary=48)
    where = {"folder": tmp_path, "name": "toy"}
    found = lade.bench.run(model, Letters(), [workload(*TEXTS)], ["hf,adaptive=12"], GREEDY, **where)
    assert found.complete and found.mismatches == [] and len(found.samples) == 6
    assert Results.load(tmp_path / "results.json") == found
    assert (found.model.name, found.model.kind, found.model.draft) == ("toy", "llama", None)


def test_run_from_python_writes_what_it_has_when_it_is_interrupted(tmp_path, monkeypatch):
    failing(monkeypatch, OwnArm, "complete", KeyboardInterrupt, calls={4})  # the first is the warm-up
    with pytest.raises(KeyboardInterrupt):
        lade.bench.run(toy_model(vocabulary=48), Letters(), [workload(*TEXTS)], ["plain"], GREEDY, folder=tmp_path)
    kept = Results.load(tmp_path / "results.json")
    assert not kept.complete and len(kept.samples) == 2


def test_about_how_long_it_takes(monkeypatch):
    def complete(self, prompt, seed, new_tokens):
        return Completion([1] * new_tokens, 9.0, Stats(1, new_tokens, prefill_s=0.5, decode_s=(new_tokens - 1) * 0.1))

    monkeypatch.setattr(OwnArm, "complete", complete)
    experiment = prepared(["plain,jacobi"], Settings(200, repeats=3), workloads=[workload(["HELLO", "AND"], ["WORLD"])])
    assert experiment.seconds_left == 0.0
    experiment.warm_up()
    assert experiment.seconds_left == pytest.approx(2 * 9 * (0.5 + 200 * 0.1))


def test_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    experiment = prepared(["hf,plain,jacobi,adaptive=8"], Settings(NEW, temperature=1.0, seeds=[5]))
    experiment.warm_up()
    finished(experiment)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (Settings(0), "max_new_tokens"),
        (Settings(5, repeats=0), "repeats"),
        (Settings(5, temperature=0.0), "temperature"),
        (Settings(5, temperature=1.0, top_k=-1), "top_k"),
        (Settings(5, temperature=1.0, top_p=1.5), "top_p"),
        (Settings(5, temperature=1.0, seeds=[]), "seeds"),
        (Settings(5, temperature=1.0, seeds=[1, 1]), "seeds"),
        (Settings(5, temperature=1.0, seeds=[-1]), "seeds"),
        (Settings(5, seeds=[3]), "seeds.*only sampling uses it"),
        (Settings(5, top_k=3), "top_k.*only sampling uses it"),
        (Settings(5, top_p=0.5), "top_p.*only sampling uses it"),
    ],
)
def test_settings_out_of_range(settings, field):
    with pytest.raises(ConfigError, match=field):
        prepared(["plain"], settings)


def test_workloads_that_cannot_be_told_apart_or_run_and_a_tokenizer_of_another_model(tmp_path):
    twice = workload(["A"], ["B"])
    twice.items[1] = replace(twice.items[1], id="p0")
    for message, given in [
        ("two workloads are named 'toys'", [workload(["A"]), workload(["B"])]),
        ("has no prompts", [workload()]),
        ("several prompts named 'p0'", [twice]),
        ("prompt 'p0' has no tokens", [workload([""])]),
        ("prompt 'p1' has 512 tokens, but the model's context holds 512", [workload(["A"], ["A" * 512])]),
    ]:
        with pytest.raises(InputError, match=message):
            prepared(["plain"], workloads=given)
    with pytest.raises(InputError, match="there is no workload"):
        prepare(models(), Letters(), [], parse_all(["plain"]), GREEDY)

    class Foreign(Letters):
        def __call__(self, text):
            return {"input_ids": [48]}

    with pytest.raises(InputError, match=r"the id 48 .* vocabulary of 48"):
        prepared(["plain"], tokenizer=Foreign())


def test_answers_that_outgrow_the_context():
    long = [workload(["A" * 500], ["A"], ["A" * 470, "B" * 20])]
    assert prepared(["plain"], workloads=long).outgrowing == 2
    with pytest.raises(InputError, match="may have 516 tokens, but the model has positions for 512"):
        prepared(["plain"], workloads=long, toy=models("gpt2"))


def test_a_method_that_transformers_cannot_run_is_named(monkeypatch):
    toy = models()
    experiment = prepared(["hf,hf-prompt-lookup"], toy=toy)
    refusal = ValueError("assisted generate is not supported")
    failing(monkeypatch, toy.plain, "generate", refusal, where=lambda *_, **given: "prompt_lookup_num_tokens" in given)
    with pytest.raises(UnsupportedError, match=r"hf-prompt-lookup fails with this model .*leave hf-prompt-lookup out"):
        experiment.warm_up()


def test_jobs_in_order():
    settings = Settings(5, temperature=1.0, seeds=[4, 6], repeats=2)
    jobs = jobs_of([workload(["A"], ["B"]), workload(["C"], name="others")], settings)
    assert [list(job.key) for job in jobs[:6]] == [
        ["toys", "p0", 4, 0], ["toys", "p1", 4, 0], ["others", "p0", 4, 0],
        ["toys", "p0", 6, 0], ["toys", "p1", 6, 0], ["others", "p0", 6, 0],
    ]  # fmt: skip
    assert [job.first for job in jobs] == [True, False, True] * 4
    assert [job.repeat for job in jobs] == [0] * 6 + [1] * 6


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not there")
def test_commits(tmp_path):
    def run(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    assert commit_of(tmp_path) is None
    run("init")
    assert commit_of(tmp_path) is None, "nothing is committed yet"
    (tmp_path / "file").write_text("one")
    run("add", "file")
    run("commit", "-m", "one")
    clean = commit_of(tmp_path)
    assert clean is not None and len(clean) == 12
    (tmp_path / "other").write_text("not tracked")
    assert commit_of(tmp_path) == clean
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == clean + "+"


def test_what_a_pass_emitted_is_by_how_much_the_cache_grew_until_the_next_one_and_one_token_has_no_steps():
    meter = Meter(None)
    meter.begin, meter.end = 10.0, 16.0
    meter.passes = [Pass(0, 5, 10.5, 11.0), Pass(5, 4, 12.0, 12.5), Pass(8, 4, 13.0, 13.5), Pass(9, 1, 14.0, 15.0)]
    stats = meter.stats(prompt_tokens=5, new_tokens=6)
    assert (stats.generations, stats.new_tokens, stats.steps) == (1, 6, 3)
    assert (stats.step_tokens, stats.accepted) == ([4, 4, 1], [3, 1, 1])
    assert (stats.fed_tokens, stats.accepted_tokens) == (9, 5)
    assert stats.histogram == {(4, 3): 1, (4, 1): 1, (1, 1): 1}
    assert (stats.draft_tokens, stats.accepted_draft_tokens) == (6, 2)
    assert (stats.prefill_s, stats.decode_s, stats.forward_s) == pytest.approx((2.0, 4.0, 2.0))
    meter.end, meter.passes = 11.0, [Pass(0, 5, 10.5, 10.75)]
    stats = meter.stats(prompt_tokens=5, new_tokens=1)
    assert (stats.generations, stats.new_tokens, stats.steps, stats.tokens_per_step) == (1, 1, 0, 0.0)
    assert (stats.prefill_s, stats.decode_s, stats.forward_s) == (1.0, 0.0, 0.0)

"""`lade bench plan`: nothing is run, so its figures can be computed by hand."""

import json
import math

import pytest
from test_cli_errors import fails

from lade.errors import ConfigError
from lade_lab.cli.plan import quantity
from lade_lab.forecast import SHIPPED
from lade_lab.results import Environment, Method, Model, Results, Sample, Settings, Workload

PEAKS = ("--bandwidth", "3.35e12", "--flops", "990e12")


@pytest.fixture
def plan(lade):
    return lambda *arguments: lade("bench", "plan", *arguments)


@pytest.fixture
def results(tmp_path):
    def sample(method, step_tokens, accepted):
        return Sample(
            workload="stories", prompt="p", turn=0, prompt_sha256="p", prompt_tokens=5, method=method, seed=0,
            repeat=0, new_tokens=1 + sum(accepted), seconds=1.0, prefill_s=0.0, decode_s=1.0, forward_s=1.0,
            steps=len(accepted), step_tokens=step_tokens, accepted=accepted, sources=[], distinct_4grams=1.0,
            output_sha256="o",
        )  # fmt: skip

    file = tmp_path / "results.json"
    methods = [Method("hf", "hf"), Method("adaptive", "adaptive"), Method("hf-assisted", "hf-assisted")]
    Results(
        "now", [], Environment("a machine", 1, {}, "Linux", None), Model("small", "llama", 1, "float32"), Settings(9),
        [Workload("stories", "jsonl", 1)], methods, "hf", True,
        [sample("hf", [1, 1], [1, 1]), sample("adaptive", [8, 8], [4, 3]), sample("hf-assisted", [6], [5])],
    ).save(file)  # fmt: skip
    return file


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("params", "7e9", 7e9), ("params", "7B", 7e9), ("params", " 7.5 b ", 7.5e9), ("params", "500M", 5e8),
        ("params", "7000000000", 7e9), ("params", ".5G", 5e8), ("params", "1.5e+9", 1.5e9),
        ("bandwidth", "3.35TB/s", 3.35e12), ("bandwidth", "900 GB/s", 9e11), ("bandwidth", "3.35T", 3.35e12),
        ("flops", "990TFLOPS", 9.9e14), ("flops", "0.99 PFLOP/s", 9.9e14), ("flops", "990e12", 9.9e14),
    ],
)  # fmt: skip
def test_numbers_as_people_write_them(name, text, value):
    assert quantity(name, text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "B", "0", "-7B", "nan", "inf", "1e999", "7 X", "7BB", "7B parameters", "7,5B", "\u0667"]
)
def test_what_is_no_number(text):
    with pytest.raises(ConfigError, match="params"):
        quantity("params", text)


def test_units_belong_to_their_quantity():
    for name, text in (("params", "7B/s"), ("bandwidth", "3TFLOPS"), ("flops", "3TB/s")):
        with pytest.raises(ConfigError, match=name):
            quantity(name, text)


def test_the_figures(plan):
    found = json.loads(plan("--params", "7e9", "--dtype", "bf16", *PEAKS, "--json").stdout)
    one = 14e9 / (0.8 * 3.35e12)
    assert found["one_token_s"] == pytest.approx(one)
    assert found["ridge_tokens"] == pytest.approx(one / (14e9 / (0.6 * 990e12)))
    assert found["free_tokens"] == math.floor(1.2 * found["ridge_tokens"])
    curve = {point["size"]: point["relative"] for point in found["curve"]}
    assert curve[1] == curve[128] == 1.0 and curve[512] == pytest.approx(512 / found["ridge_tokens"])
    kept = next(each for each in found["methods"] if each["name"] == "adaptive kept, budget 16")
    (known,) = (each for each in SHIPPED.acceptances if each.name == kept["name"])
    step = one + known.own_s
    assert kept["step_s"] == pytest.approx(step)
    assert kept["speedup"] == pytest.approx(known.tokens_per_step * (one + SHIPPED.plain_own_s) / step)
    assert found["plain"]["tokens_per_s"] == pytest.approx(1 / (one + SHIPPED.plain_own_s))
    assert len(found["best"]) == 2 and len(found["assumptions"]) >= 7


def test_every_choice_has_an_effect_and_is_printed(plan):
    def one(*arguments):
        return json.loads(plan("--params", "7B", *PEAKS, *arguments, "--json").stdout)

    base = one()
    assert one("--dtype", "fp32")["one_token_s"] == pytest.approx(2 * base["one_token_s"])
    assert one("--bandwidth-share", 0.4)["one_token_s"] == pytest.approx(2 * base["one_token_s"])
    assert one("--flops-share", 0.3)["ridge_tokens"] == pytest.approx(base["ridge_tokens"] / 2)
    assert one("--overhead", 0.001)["one_token_s"] == pytest.approx(base["one_token_s"] + 0.001)
    cache = one("--cached", 1000, "--layers", 32, "--kv-heads", 8, "--head-dim", 128)
    assert cache["roofline"]["cache_bytes"] == 2 * 1000 * 32 * 8 * 128 * 2
    free = one("--library-time", 0)
    assert free["methods"][0]["step_s"] == pytest.approx(base["one_token_s"])
    text = " ".join(plan("--params", "7B", *PEAKS, "--overhead", 0.002, "--bandwidth-share", 0.7).stdout.split())
    for words in ("2 ms of each pass", "0.7 of 3.35 TB/s", "0.6 of 990 TFLOPS", "Attention's own arithmetic"):
        assert words in text


def test_several_devices(plan):
    layers = 32

    def shared(*arguments):
        found = json.loads(plan("--params", "7B", *PEAKS, "--layers", layers, *arguments, "--json").stdout)
        return {each["name"].partition(", ")[0] + each["name"].rpartition(",")[2]: each for each in found["shared"]}

    near, far = shared("--devices", 2), shared("--devices", 2, "--interconnect", "pcie")
    tensor, lookahead = "adaptive cold tensor parallel over 2", "adaptive cold lookahead parallel over 2"
    assert far[tensor]["step_s"] > near[tensor]["step_s"] and far[lookahead]["step_s"] > near[lookahead]["step_s"]
    assert near[tensor]["speedup"] > near[lookahead]["speedup"] > 1.0
    hidden, one = math.sqrt(7e9 / (12 * layers)), 14e9 / (0.8 * 3.35e12)
    alone = shared("--devices", 2, "--library-time", 0)[tensor]
    exchanges = 2 * layers * (12e-6 + alone["fed"] * hidden * 2 / 200e9)
    assert alone["step_s"] == pytest.approx(one / 2 + exchanges + 1e-4)
    text = " ".join(plan("--params", "7B", *PEAKS, "--layers", layers, "--devices", 4).stdout.split())
    assert "tensor parallel over 4" in text and "Assumed, not measured." in text


def test_the_tables_and_the_warning(plan):
    result = plan("--params", "7B", "--device", "h100-sxm")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["256", "6.04", "1.16", "computing"] in rows and ["1", "5.22", "1.00", "reading"] in rows
    (row,) = [row for row in rows if row[:4] == ["adaptive", "kept,", "budget", "64"]]
    assert row[4:6] == ["64.0", "4.11"] and float(row[7]) == pytest.approx(3.71, abs=0.01)
    assert "NVIDIA H100 datasheet" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    warning = " ".join(result.stderr.split())
    assert "docs/measurements.md" in warning and "depends on text and model" in warning and "--results" in warning


def test_a_device_can_be_corrected(plan):
    found = json.loads(plan("--params", "7B", "--device", "l4", "--bandwidth", "600e9", "--json").stdout)
    assert (found["roofline"]["bandwidth"], found["roofline"]["flops"]) == (600e9, 121e12)
    fp8 = json.loads(plan("--params", "7B", "--device", "l4", "--dtype", "fp8", "--flops", "242T", "--json").stdout)
    assert fp8["roofline"]["flops"] == 242e12


def test_acceptance_of_ones_own(plan, results):
    found = json.loads(plan("--params", "7B", *PEAKS, "--results", results, "--json").stdout)
    (method,) = found["methods"]
    assert (method["name"], method["fed"], method["tokens_per_step"]) == ("adaptive", 8.0, 3.5)
    assert method["speedup"] == pytest.approx(3.5) and found["best"] == []
    assert "small, float32, on a machine" in found["source"]
    assert [each["method"] for each in found["left_out"]] == ["hf-assisted"]
    shown = plan("--params", "7B", *PEAKS, "--results", results)
    assert "hf-assisted: left out" in shown.stdout and "small, float32" in " ".join(shown.stderr.split())


def test_files_that_are_no_results(plan, tmp_path):
    def with_results(file):
        return plan("--params", "7B", *PEAKS, "--results", file)

    fails(with_results(tmp_path / "none.json"), "none.json", "No such file")
    fails(with_results(tmp_path), str(tmp_path), "directory")
    for text in ("", "{", "[]"):
        (tmp_path / "bad.json").write_text(text)
        fails(with_results(tmp_path / "bad.json"), "bad.json", "results")


@pytest.mark.parametrize("name", ["plan.svg", "plan.PNG"])
def test_it_is_drawn(name, plan, tmp_path):
    result = plan("--params", "7B", *PEAKS, "--out", tmp_path / name)
    assert result.exit_code == 0, result.output
    assert (tmp_path / name).read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


def test_without_matplotlib_the_remedy_is_named(plan, tmp_path, monkeypatch):
    monkeypatch.setattr("lade.cli.options.grouping.find_spec", lambda name: None)
    fails(plan("--params", "7B", *PEAKS, "--out", tmp_path / "plan.svg"), 'pip install "lookahead-decoding[bench]"')


def test_a_file_that_cannot_be_written(plan, tmp_path):
    (tmp_path / "plan.svg").mkdir()
    fails(plan("--params", "7B", *PEAKS, "--out", tmp_path / "plan.svg"), "--out", "plan.svg")
    (tmp_path / "gone.svg").symlink_to(tmp_path / "no" / "where.svg")
    result = plan("--params", "7B", *PEAKS, "--out", tmp_path / "gone.svg")
    assert result.exit_code == 2 and "cannot write" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--params", "7x", *PEAKS], ["--params 7x", "7B"]),
        (["--params", "-1", *PEAKS], ["--params -1", "> 0"]),
        (["--params", "7B"], ["--bandwidth", "--device"]),
        (["--params", "7B", "--bandwidth", "3e12"], ["--flops", "990e12"]),
        (["--params", "7B", "--bandwidth", "0", "--flops", "1T"], ["--bandwidth 0", "> 0"]),
        (["--params", "7B", "--device", "abacus"], ["--device abacus", "h100-sxm"]),
        (["--params", "7B", "--device", "h200", "--dtype", "fp8"], ["--flops", "16 bits", "fp8"]),
        (["--params", "7B", *PEAKS, "--dtype", "int9"], ["--dtype int9", "bf16"]),
        (["--params", "7B", *PEAKS, "--overhead", "nan"], ["--overhead nan", ">= 0"]),
        (["--params", "7B", *PEAKS, "--bandwidth-share", "80"], ["--bandwidth-share 80.0", "<= 1"]),
        (["--params", "7B", *PEAKS, "--library-time", "-1"], ["--library-time -1.0", ">= 0"]),
        (["--params", "7B", *PEAKS, "--cached", "9"], ["--cached 9", "--layers --kv-heads --head-dim"]),
        (["--params", "7B", *PEAKS, "--cached", "-9"], ["--cached -9", ">= 1"]),
        (["--params", "7B", *PEAKS, "--layers", "9"], ["--cached 0", "--layers"]),
        (["--params", "7B", *PEAKS, "--devices", "3", "--layers", "9"], ["--devices 3", "2, 4, 8"]),
        (["--params", "7B", *PEAKS, "--devices", "2"], ["--devices 2", "--layers"]),
        (["--params", "7B", *PEAKS, "--devices", "2", "--layers", "9", "--interconnect", "usb"], ["usb", "nvlink"]),
        (["--params", "7B", *PEAKS, "--out", "plan.txt"], ["--out plan.txt", ".svg"]),
        (["--params", "7B", *PEAKS, "--out", "no/such/plan.svg"], ["--out", "does not exist"]),
    ],
)
def test_what_cannot_be_planned(arguments, words, plan):
    fails(plan(*arguments), *words)


def test_help_has_an_example_and_all_devices(plan):
    from lade_lab.roofline import DEVICES

    out = " ".join(plan("--help").stdout.replace("│", " ").split())
    assert "lade plan --params 7B" in out and all(name in out for name in DEVICES)


def test_both_names_are_one_command(lade, plan):
    arguments = ("--params", "7B", *PEAKS, "--devices", "2", "--interconnect", "pcie", "--layers", "32")
    short, long = lade("plan", *arguments), plan(*arguments)
    assert short.exit_code == 0 and "lookahead parallel over 2" in " ".join(short.stdout.split())
    assert (short.stdout, short.stderr) == (long.stdout, long.stderr)
    assert "Estimate speeds" in lade("bench", "--help").stdout and "Estimate speeds" in lade("--help").stdout
    helps = [" ".join(each.stdout.split()) for each in (lade("plan", "--help"), plan("--help"))]
    assert all("--interconnect" in text and "Example: lade plan --params 7B" in text for text in helps)

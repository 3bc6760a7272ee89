"""Which model is loaded, from where, and how: the options that all commands with a model share."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import typer.main
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError
from pretend import not_found, own_modules, typed
from safetensors.torch import load_file, save_file
from spies import failing
from test_cli_errors import fails
from transformers import LlamaForCausalLM

import lade
from lade.cli.loading import from_pretrained as module
from lade.cli.loading import load
from lade.cli.loading.from_pretrained import SCHEMES, Scheme
from lade.cli.main import app
from lade.cli.options.model import QUANTIZATIONS, Loading
from lade.cli.terminal import terminal
from lade.embedded import model_path
from lade_lab.cli.job import command_line

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

PROMPT = "say it again, say it"
NEW = 20
LOADING_COMMANDS = [["generate"], ["chat"], ["info"], ["doctor"], ["warm"], ["bench"], ["bench", "scaling"]]


@pytest.fixture
def generate(lade, folder):
    def run(*arguments, model=folder):
        return lade("generate", "-m", model, "-p", PROMPT, "-n", NEW, "--json", *arguments)

    return run


@pytest.fixture
def expected(plain, tokenizer):
    """What plain decoding says."""
    return plain(tokenizer(PROMPT)["input_ids"], NEW)


def ids_of(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["token_ids"]


# Every command


@pytest.mark.parametrize("command", LOADING_COMMANDS, ids=" ".join)
def test_every_command_with_a_model_has_all_of_the_options_and_hands_them_on(lade, command, tmp_path, prompt_lines):
    """A dtype that is none is the last thing looked at before a model is loaded, whatever else a command needs."""
    found = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]
    options = {parameter.name for parameter in found.params}
    assert {field.name for field in fields(Loading)} | {"quiet", "no_color", "debug"} <= options
    needs = {"generate": ["-p", "x"], "warm": ["--prompts", prompt_lines("one"), "--out", tmp_path / "m"]}
    needs |= {"bench": ["--out", tmp_path / "b"], "scaling": ["--out", tmp_path / "s"]}
    fails(lade(*command, *needs.get(command[-1], []), "--dtype", "int3"), "--dtype int3", "bf16")


@pytest.mark.slow
def test_the_environment_names_the_model(report, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    named = {"LADE_MODEL": str(folder), "LADE_DTYPE": "bf16"}
    facts = report("info", env=named)
    assert (facts["model"], facts["dtype"]) == (str(folder), "bfloat16")
    assert report("info", "--dtype", "fp64", env=named)["dtype"] == "float64", "the command line comes first"
    assert report("info", "--model", "embedded", env=named)["model"] == "embedded", "it can be had all the same"


def test_nothing_but_the_command_line_lets_code_be_run():
    """Variables are inherited by programs that know nothing of them."""
    for option in typer.main.get_command(app).commands["generate"].params:
        if option.name in ("trust_remote_code", "token"):
            assert option.envvar is None


# Dtype and device


@pytest.mark.parametrize(
    ("alias", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("fp64", "float64")]
)
def test_dtypes_have_short_names(folder, alias, dtype):
    with terminal() as term:
        assert load(Loading(str(folder), dtype=alias), term=term).dtype == dtype


def test_auto_takes_apples_gpu_where_there_is_one(generate, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    fails(generate(), "--device mps", "give cpu")  # there is none here in truth


def test_a_device_map_instead_of_a_device(generate, expected, monkeypatch):
    assert ids_of(generate("--device-map", "cpu")) == ids_of(generate("--device-map", '{"": "cpu"}')) == expected
    fails(generate("--device-map", "auto", "--device", "cpu"), "--device-map auto", "--device cpu")
    fails(generate("--device-map", '{"": '), "--device-map", "JSON")
    fails(generate("--device-map", '{"": "abacus"}'), "--device-map", "abacus")
    not_found(monkeypatch, module)
    fails(generate("--device-map", "auto"), "--device-map auto", "pip install accelerate")


# Attention, quantisation, adapters


def test_the_attention_can_be_chosen(report, generate, folder, expected):
    assert report("info", "-m", folder)["attention"] == "sdpa"
    assert report("info", "-m", folder, "--attn-implementation", "eager")["attention"] == "eager"
    assert ids_of(generate("--attn-implementation", "eager")) == expected
    fails(generate("--attn-implementation", "magic"), "--attn-implementation magic", "sdpa or eager")


def test_schemes_are_named_and_their_libraries_too(generate, monkeypatch):
    assert tuple(SCHEMES) == QUANTIZATIONS, "the help has them"
    fails(generate("--quantization", "int3"), "--quantization int3", ", ".join(SCHEMES), "installed here: ")
    monkeypatch.setitem(SCHEMES, "bnb-4bit", Scheme("no-such", "no_such.module", dict))
    fails(generate("--quantization", "bnb-4bit"), "--quantization bnb-4bit", "pip install accelerate no-such")


def test_a_scheme_reaches_transformers(generate, folder, monkeypatch):
    """The libraries themselves are tried by tests/parity/test_quantised_libraries.py."""
    given, original = {}, module.AutoModelForCausalLM.from_pretrained

    def from_pretrained(*args, quantization_config, **kwargs):
        given.update(kwargs, config=quantization_config)
        return original(*args, **kwargs)

    monkeypatch.setitem(SCHEMES, "bnb-4bit", Scheme("json", "json", lambda: "four bits"))
    monkeypatch.setattr(module.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    assert ids_of(generate("--quantization", "bnb-4bit"))
    assert given["config"] == "four bits" and given["device_map"] == {"": torch.device("cpu")}


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    """A LoRA adapter that changes what the model says."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(LlamaForCausalLM.from_pretrained(folder), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    path = tmp_path_factory.mktemp("adapters") / "lora"
    model.save_pretrained(path)
    return path


def test_an_adapter_says_what_peft_says(report, generate, folder, adapter, expected, tokenizer):
    from peft import PeftModel

    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folder), adapter)
    adapted = model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()
    result = generate("--adapter", adapter)
    assert ids_of(result) == adapted != expected
    assert json.loads(result.stdout)["config"] is not None, "it is accelerated"
    facts = report("info", "-m", folder, "--adapter", adapter)
    assert facts["adapter"] == str(adapter) and facts["supported"] is True


def test_adapters_that_do_not_fit(generate, adapter, tmp_path, monkeypatch):
    fails(generate("--adapter", tmp_path), "--adapter")
    fails(generate("--adapter", adapter, model=model_path()), "--adapter")
    shutil.copytree(adapter, tmp_path / "other")
    weights = load_file(adapter / "adapter_model.safetensors")
    first = min(weights)
    missing = {name: weight for name, weight in weights.items() if name != first}
    for changed in (missing, {**weights, first.replace("layers.0", "layers.7"): weights[first].clone()}):
        save_file(changed, tmp_path / "other" / "adapter_model.safetensors")
        fails(generate("--adapter", tmp_path / "other"), "--adapter")
    fails(generate("--adapter", "./none"), "--adapter ./none")
    not_found(monkeypatch, module)
    fails(generate("--adapter", adapter), "--adapter", "pip install peft")


# The hub


def info(lade, tmp_path, *arguments):
    return lade("info", "--json", "-m", "some/model", "--cache-dir", tmp_path / "cache", *arguments)


@pytest.mark.one_in(2)
def test_a_model_comes_from_the_hub_at_a_revision(lade, hub, tmp_path, monkeypatch):
    facts = json.loads(info(lade, tmp_path, "--token", "secret").stdout)
    assert facts["model"] == "some/model" and facts["chat_template"] is False
    assert {token for _, path, token in hub.requests if "/resolve/" in path} == {"secret"}
    facts = json.loads(info(lade, tmp_path, "--revision", "v2").stdout)
    assert facts["chat_template"] is True
    assert any((tmp_path / "cache").rglob("model.safetensors"))
    fails(info(lade, tmp_path, "--revision", "v3"), "--revision v3", "some/model")
    fails(lade("info", "-m", "no/such"), "'no/such'")


@pytest.mark.slow
def test_without_the_network_there_is_the_cache(lade, hub, tmp_path):
    fails(info(lade, tmp_path, "--local-files-only"), "some/model", "--local-files-only")
    assert info(lade, tmp_path).exit_code == 0
    asked = len(hub.requests)
    assert info(lade, tmp_path, "--local-files-only").exit_code == 0
    assert len(hub.requests) == asked


def test_revisions_are_the_hubs_and_a_gated_model_is_called_that(generate, lade, monkeypatch):
    fails(generate("--revision", "v2"), "--revision v2")
    fails(lade("info", "--revision", "v2"), "--revision v2", "embedded")
    failing(monkeypatch, HfApi, "model_info", GatedRepoError.__new__(GatedRepoError))
    fails(lade("info", "-m", "some/model"), "gated", "hf auth login")


# Code of a checkpoint's own


@pytest.fixture
def with_code(folder, tmp_path, edited, monkeypatch):
    """A checkpoint that brings its class along, which leaves a file when it is imported."""
    own_modules(monkeypatch, tmp_path / "modules")
    config = {"model_type": "mine", "auto_map": {
        "AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM",
    }}  # fmt: skip
    copy = edited(folder, tmp_path / "coded", config=config)
    ran = tmp_path / "ran"
    (copy / "mine.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(ran)!r}).touch()\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    return copy, ran


def test_code_is_run_only_if_one_says_so(generate, with_code, expected):
    copy, ran = with_code
    fails(generate(model=copy), "coded", "--trust-remote-code")
    assert not ran.exists()
    assert ids_of(generate("--trust-remote-code", model=copy)) == expected
    assert ran.exists()


# Records


def test_no_record_has_the_token(monkeypatch):
    for words, masked in (["--token", "hf_x"], ["--token", "..."]), (["--token=hf_x"], ["--token=..."]):
        typed(monkeypatch, "lade", "bench", *words, "--limit", "1")
        assert command_line() == ["lade", "bench", *masked, "--limit", "1"]
    assert "hf_x" not in repr(Loading(token="hf_x"))
    package = Path(lade.__file__).parent
    readers = {str(path.relative_to(package)) for path in package.rglob("*.py") if "sys.argv[1:]" in path.read_text()}
    restarts = "cli/serve.py"  # hands the line to torchrun, which starts it again
    assert readers == {restarts}, "records are made of what command_line() gives"


def test_an_adapted_model_has_another_name_in_records(folder):
    assert Loading(str(folder)).label() == folder.name
    loading = Loading(str(folder), revision="v2", adapter="a/b", quantization="bnb-4bit")
    assert loading.label() == f"{folder.name} (revision v2, adapter a/b, quantization bnb-4bit)"
    assert loading.for_model("draft").label() == "draft (quantization bnb-4bit)"

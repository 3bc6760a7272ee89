"""`lade info`."""

import json

import pytest


@pytest.mark.slow
def test_info(lade, folder, model):
    facts = json.loads(lade("info", "-m", folder, "--json").stdout)
    assert facts["class"] == "LlamaForCausalLM"
    assert facts["supported"] is True and facts["reason"] is None
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert (facts["layers"], facts["context"], facts["vocabulary"]) == (2, 512, 257)
    assert (facts["dtype"], facts["device"], facts["attention"]) == ("float32", "cpu", "sdpa")
    assert lade("info", "-m", folder, "--dtype", "bfloat16", "--json").stdout.count("bfloat16") == 1
    shown = lade("info", "-m", folder)
    assert shown.exit_code == 0 and "supported" in shown.stdout and "yes" in shown.stdout


def test_info_takes_the_model_as_an_argument_too(lade, folder, unsupported):
    assert lade("info", folder, "--json").stdout == lade("info", "-m", folder, "--json").stdout
    facts = json.loads(lade("info", unsupported, "-m", folder, "--json").stdout)
    assert facts["model"] == str(unsupported)
    facts = json.loads(lade("info", "--json").stdout)
    assert (facts["model"], facts["supported"], facts["dtype"]) == ("embedded", True, "float32")


def test_info_says_why_not(lade, unsupported):
    facts = json.loads(lade("info", "-m", unsupported, "--json").stdout)
    assert facts["supported"] is False and "mask" in facts["reason"]
    assert "no" in lade("info", "-m", unsupported).stdout

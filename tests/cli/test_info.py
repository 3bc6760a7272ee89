"""`lade info`."""

import pytest


@pytest.mark.slow
def test_info(lade, report, folder, model):
    facts = report("info", "-m", folder)
    assert facts["class"] == "LlamaForCausalLM"
    assert facts["supported"] is True and facts["reason"] is None
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert (facts["layers"], facts["context"], facts["vocabulary"]) == (2, 512, 257)
    assert (facts["dtype"], facts["device"], facts["attention"]) == ("float32", "cpu", "sdpa")
    assert lade("info", "-m", folder, "--dtype", "bfloat16", "--json").stdout.count("bfloat16") == 1
    shown = lade("info", "-m", folder)
    assert shown.exit_code == 0 and "supported" in shown.stdout and "yes" in shown.stdout


def test_info_takes_the_model_as_an_argument_too_and_says_why_it_is_not_supported(lade, report, folder, unsupported):
    assert report("info", folder) == report("info", "-m", folder)
    facts = report("info", unsupported, "-m", folder)
    assert facts["model"] == str(unsupported) and facts["supported"] is False and "mask" in facts["reason"]
    assert "no" in lade("info", "-m", unsupported).stdout
    facts = report("info")
    assert (facts["model"], facts["supported"], facts["dtype"]) == ("embedded", True, "float32")

"""`-m FILE.gguf` in the shell."""

import pytest
import transformers
from made_gguf import written

pytestmark = [
    pytest.mark.usefixtures("rounds_alike"),
    pytest.mark.skipif(
        tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23), reason="GGUF files need transformers 5.23"
    ),
]
PROMPT = ["-p", "the the the", "-n", 8]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return written(tmp_path_factory.mktemp("gguf") / "made.gguf", "llama", "Q4_K", {"attn_v": "Q6_K"})


def test_a_file_or_its_folder_is_a_model_and_chat_uses_its_template(lade, report, file):
    found = [report("generate", "-m", where, *PROMPT) for where in (file, file.parent)]
    plain = report("generate", "-m", file, *PROMPT, "--method", "plain")
    assert found[0]["token_ids"] == found[1]["token_ids"] == plain["token_ids"] and plain["token_ids"]
    facts = report("info", "-m", file)
    assert (facts["weights"], facts["dtype"]) == ("gguf", "bfloat16")
    assert "is packed already" in lade("pack", file, "--save", file.parent / "saved").stderr
    assert report("generate", "-m", file, *PROMPT, "--dtype", "float32")["dtype"] == "float32"
    shown = lade("chat", "-m", file, "--max-new-tokens", 4, stdin="hello\n/quit\n")
    assert shown.exit_code == 0, shown.stderr


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--weights", "int8"], "the weights are those of a GGUF file"),
        (["--quantization", "quanto-int8"], "not available for a packed model"),
        (["--device-map", "auto"], "not available for a packed model"),
        (["--adapter", "some"], "not available for a GGUF file"),
        (["--revision", "main"], "has no revisions"),
    ],
)
def test_options_that_contradict_the_file_are_refused(lade, file, given, told):
    result = lade("generate", "-m", file, *PROMPT, *given)
    assert result.exit_code == 2 and told in result.stderr and len(result.stderr.splitlines()) == 1


def test_files_and_folders_that_are_none_are_refused_in_a_line(lade, file, tmp_path):
    other = tmp_path / "model.bin"
    other.write_bytes(b"weights")
    assert "is a file, and not a .gguf" in lade("generate", "-m", other, *PROMPT).stderr
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert "has no config.json" in lade("generate", "-m", tmp_path, *PROMPT).stderr
    result = lade("generate", "-m", tmp_path / "one.gguf", *PROMPT)
    assert result.exit_code and "is damaged, or no GGUF file" in result.stderr and len(result.stderr.splitlines()) == 1

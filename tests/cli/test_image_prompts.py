"""Images in the shell: a tiny multimodal checkpoint with its processor, asked with `--image` and `/image`."""

import base64
import copy
import time
from functools import partial

import pytest
import torch
from PIL import Image
from pretend import no_warm_up, not_found
from starlette.testclient import TestClient
from test_cli_errors import fails
from transformers import AutoProcessor, GenerationConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from lade.cli import encoder
from lade.cli.loading import from_pretrained
from lade.cli.options.decoding import Speed
from lade.cli.options.model import Loading
from lade.cli.serve import load_served
from lade.cli.terminal import terminal
from lade.server.app import build_app
from lade.server.service import Service
from lade.server.settings import Settings

IMAGE, SIDE, CONTEXT = "<image>", 16, 512
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}|{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_llava(tokenizer):
    """A model, which writes letters only, and its processor."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    text = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4,
        "max_position_embeddings": CONTEXT, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
        "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": SIDE, "patch_size": 8, "projection_dim": 32, "initializer_range": 0.4,
    }  # fmt: skip
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=image, tie_word_embeddings=False)
    model = LlavaForConditionalGeneration(config)
    letters = torch.zeros(len(tokenizer), 1)
    letters[tokenizer("abcdefghijklmnopqrstuvwxyz ,.")["input_ids"]] = 1.0
    model.lm_head.weight.data *= letters
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    tokens = {"image_token": IMAGE, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    return model, LlavaProcessor(images, tokenizer, patch_size=8, chat_template=TEMPLATE, **tokens)


@pytest.fixture(scope="session")
def seeing(tokenizer, tmp_path_factory):
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("models") / "llava"
    for part in tiny_llava(tokenizer):
        part.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{colour}.png" for colour in ("red", "blue")]
    for path in paths:
        Image.new("RGB", (20, 30), path.stem).save(path)
    return paths


def answer(folder, messages, new=20):
    """What plain `model.generate` makes of a conversation, as the processor's own documentation has it done."""
    model, processor = LlavaForConditionalGeneration.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    asked = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(messages, **asked)
    output = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    return ids, processor.tokenizer.decode(ids, skip_special_tokens=True)


def user(text, *pictures):
    parts = [{"type": "image", "path": str(path)} for path in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [[], ["--method", "plain"], ["--window", 7, "--ngram", 4, "--guesses", 7]])
def test_generate_answers_about_images(report, seeing, pictures, options):
    shown = [it for path in pictures for it in ("--image", path)]
    said = report("generate", "What is it?", *shown, "--model", seeing, "-n", 20, *options)
    ids, _ = answer(seeing, [user("What is it?", *pictures)])
    assert said["token_ids"] == ids
    assert ids != answer(seeing, [user("What is it?", *pictures[::-1])])[0], "the images do nothing"


def test_a_server_answers_about_images(seeing, pictures, monkeypatch):
    no_warm_up(monkeypatch)
    with terminal() as term:
        service = Service(Settings(max_rows=2), partial(load_served, Loading(model=str(seeing)), Speed(), None, term))
        with TestClient(build_app(service), base_url="http://localhost") as client:
            while service.phase == "loading" and service.problem is None:
                time.sleep(0.01)
            for order in (pictures, pictures[::-1]):
                urls = [f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" for path in order]
                content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
                messages = [{"role": "user", "content": [*content, {"type": "text", "text": "What is it?"}]}]
                body = {"messages": messages, "temperature": 0, "max_tokens": 20, "return_token_ids": True}
                said = client.post("/v1/chat/completions", json=body).json()
                assert said["choices"][0]["token_ids"] == answer(seeing, [user("What is it?", *order)])[0], said


@pytest.mark.slow
def test_what_images_do_not_go_with(lade, seeing, templated, pictures, tmp_path, prompt_lines):
    ask = ("generate", "hi", "--image", pictures[0], "--model")
    fails(lade(*ask, templated), "takes no images")
    fails(lade(*ask, seeing, "--raw"), "--image", "leave out --raw")
    fails(lade("generate", "hi", "--image", tmp_path / "none.png", "--model", seeing), "none.png", "No such file")
    (tmp_path / "text.png").write_text("no image")
    fails(lade("generate", "hi", "--image", tmp_path / "text.png", "--model", seeing), "text.png", "PNG")
    many = ("generate", "--prompts", prompt_lines("a", "b"), "--image", pictures[0], "--model", seeing)
    fails(lade(*many), "--image", "single prompt")
    said = chat(lade, seeing, "/image", "/image none.png", f"/image {pictures[0]}", "look", "/reset", "hi")
    assert said.exit_code == 0
    assert "/image needs a file" in said.output and "'none.png' cannot be read" in said.output
    assert answer(seeing, [user("hi")], 12)[1] in said.stdout
    said = chat(lade, templated, f"/image {pictures[0]}", "hi")
    assert said.exit_code == 0 and "processor" in said.output


@pytest.mark.slow
def test_what_is_missing_is_named_with_what_installs_it(lade, seeing, tokenizer, pictures, monkeypatch, tmp_path):
    ask = ("generate", "hi", "--image", pictures[0], "--model")
    model, processor = tiny_llava(tokenizer)
    for part in (model, processor.tokenizer):
        part.save_pretrained(tmp_path / "bare")
    fails(lade(*ask, tmp_path / "bare"), "processor")
    for module in (encoder, from_pretrained):
        not_found(monkeypatch, module, "PIL")
    fails(lade(*ask, seeing), "pip install pillow")


def chat(lade, folder, *lines, new=12):
    return lade("chat", "--model", folder, "--no-history", "-n", new, stdin="".join(f"{line}\n" for line in lines))


@pytest.mark.slow
def test_chat_shows_images_and_remembers_them(lade, seeing, pictures):
    red, blue = pictures
    lines = "hello", f"/image {red}", "What is it?", "and now?", "/stats", f"/image {blue}", "compare", "/retry"
    said = chat(lade, seeing, *lines)
    assert said.exit_code == 0, said.output
    turns, replies = [], []
    for turn in (user("hello"), user("What is it?", red), user("and now?"), user("compare", blue)):
        turns.append(turn)
        replies.append(answer(seeing, turns, 12)[1])
        turns.append({"role": "assistant", "content": [{"type": "text", "text": replies[-1].strip()}]})
    places = [said.stdout.find(reply) for reply in replies]
    assert -1 not in places and places == sorted(places), (replies, said.stdout)
    assert said.stdout.count(replies[-1]) == 2, "/retry shows the image again"
    blind = answer(seeing, [turns[0], turns[1], user("What is it?")], 12)[1]
    assert blind != replies[1], "the image does nothing"

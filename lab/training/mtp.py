"""Train a multi-token prediction layer for a Llama: `python -m training.mtp --help`.

The layer learns from texts that the model writes itself, towards the model's own distribution at each place: without a
corpus. It is trained as it drafts: on its own outputs, three levels deep, where level j at a place knows the model's
true states up to j places before, and the entries of the levels between. It begins as the model's last layer.

The checkpoint that is written is the model's with a folder `mtp` beside its files. There the layer's weights lie in a
`model.safetensors` of their own, named as in Mellum and Qwen3.5, which `transformers.modeling_layers.MtpModel` reads.
Among the model's own weights transformers would report them as unexpected.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM
from transformers.modeling_layers import MtpLayer

from lade.backends.mtp.load import SUBFOLDER

LEVEL_WEIGHTS = (1.0, 0.7, 0.5)
"""Weights of the levels' losses."""
PLACE_SHARES = (0.6, 0.35, 0.25)
"""Shares of the places whose logits are computed, by level: the head is most of the work."""
TEMPERATURES = (0.5, 0.7, 0.9, 1.0)
KEEP_SECONDS = 120.0
"""Seconds between checkpoints: an interrupted run keeps the last one."""
_WEIGHTS = "model.safetensors"
_NAMES = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def new_layer(model: LlamaForCausalLM, seed: int = 0) -> Any:
    """Return an MTP layer that begins as the model's last layer, behind a new projection drawn from `seed`."""
    layers: Any = model.model.layers
    torch.manual_seed(seed)
    layer: Any = MtpLayer(model.config, type(layers[-1]), type(model.model.norm), 0)
    layer.mtp_block.load_state_dict(layers[-1].state_dict())
    layer.mtp_block.self_attn.layer_idx = 0
    layer.post_norm.load_state_dict(model.model.norm.state_dict())
    return layer


def level_mask(length: int, level: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask of one level, [1, 1, T - level, sum of T - i for i = 1..level].

    The query at place p sees entries of level 1 up to place p - level + 1, and of each level i in 2..level the one on
    its own path, at place p - level + i.
    """
    places = torch.arange(level, length)[:, None]
    parts = [torch.arange(1, length)[None] <= places - level + 1]
    parts += [torch.arange(i, length)[None] == places - level + i for i in range(2, level + 1)]
    seen = torch.cat(parts, dim=1)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]


def unrolled(layer: Any, model: Any, ids: torch.Tensor, states: torch.Tensor, levels: int) -> list[torch.Tensor]:
    """Return the layer's outputs at each level, [B, T - level, H], the first of place `level`.

    Args:
        layer: an MTP layer.
        model: the Llama whose embedding and rotary frequencies it shares.
        ids: [B, T].
        states: [B, T, H], the model's, after the final norm.
        levels: how often the layer is used on its own outputs, and once more.
    """
    cache, embedded, before, outputs = DynamicCache(), model.model.embed_tokens(ids), states[:, :-1], []
    for level in range(1, levels + 1):
        places = torch.arange(level, ids.shape[1])[None]
        inputs = embedded[:, level:]
        rotated = model.model.rotary_emb(inputs, position_ids=places)
        mask = level_mask(ids.shape[1], level, inputs.dtype)
        output = layer(inputs, before, rotated, mask, places, cache)
        outputs.append(output)
        before = output[:, :-1]
    return outputs


def losses(
    layer: Any, model: Any, ids: torch.Tensor, levels: int = 3, shares: Sequence[float] | None = PLACE_SHARES
) -> tuple[list[torch.Tensor], list[float]]:
    """Return each level's cross-entropy with the model's distribution, [], and how often its argmax agrees.

    Args:
        layer: an MTP layer.
        model: the Llama that it predicts.
        ids: [B, T], texts.
        levels: how deep to unroll.
        shares: shares of the places that are looked at, drawn at random; None for all.
    """
    with torch.no_grad():
        states = model.model(ids).last_hidden_state
        logits = model.lm_head(states).float()
        target, best = logits.softmax(-1), logits.argmax(-1)
    found, agreements = list[torch.Tensor](), list[float]()
    for level, output in enumerate(unrolled(layer, model, ids, states, levels), start=1):
        wanted, chosen = target[:, level:], best[:, level:]
        if shares is not None:
            places = torch.rand(output.shape[:2]) < shares[level - 1]
            wanted, chosen = wanted[places], chosen[places]
        predicted = model.lm_head(output if shares is None else output[places]).float()
        found.append(-(wanted * predicted.log_softmax(-1)).sum(-1).mean())
        agreements.append((predicted.argmax(-1) == chosen).float().mean().item())
    return found, agreements


@torch.no_grad()
def written_texts(model: Any, count: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Return texts that the model writes from its first token on, [count, tokens], equally many at each temperature."""
    torch.manual_seed(seed)
    first = torch.full((math.ceil(count / len(TEMPERATURES)), 1), model.config.bos_token_id)
    texts = [
        model.generate(
            first,
            do_sample=True,
            temperature=each,
            top_k=0,
            max_new_tokens=tokens - 1,
            eos_token_id=None,
            pad_token_id=0,
        )
        for each in TEMPERATURES
    ]
    return torch.cat(texts)[torch.randperm(len(texts) * len(first))][:count]


def train_layer(
    layer: nn.Module,
    model: Any,
    texts: torch.Tensor,
    *,
    seconds: float,
    batch: int = 8,
    rate: float = 2e-3,
    keep: Callable[[], None] | None = None,
) -> list[float]:
    """Train a layer on texts, [N, T], for a time in seconds; return the loss of each step. The model is not changed.

    `keep` is called every `KEEP_SECONDS`, to write a checkpoint.
    """
    model.requires_grad_(False)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    start, seen, order, history = time.monotonic(), 0, torch.randperm(len(texts)), list[float]()
    kept = 0.0
    while (passed := time.monotonic() - start) < seconds:
        warmup, cooling = min(1.0, (len(history) + 1) / 50), 0.5 * (1 + math.cos(math.pi * passed / seconds))
        for group in optimizer.param_groups:
            group["lr"] = rate * warmup * cooling + 1e-5
        if seen + batch > len(order):
            order, seen = torch.randperm(len(texts)), 0
        found, _ = losses(layer, model, texts[order[seen : seen + batch]])
        seen += batch
        loss = torch.stack([weight * each for weight, each in zip(LEVEL_WEIGHTS, found, strict=True)]).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        history.append(loss.item())
        if keep is not None and passed - kept > KEEP_SECONDS:
            keep()
            kept = passed
    return history


def export_layer(layer: nn.Module, source: Path, folder: Path) -> None:
    """Write the checkpoint of `source` to `folder` with the layer beside it, in the dtype of the model's weights."""
    if folder.resolve() != source.resolve():
        shutil.copytree(source, folder, dirs_exist_ok=True)
    config = folder / "config.json"
    with safe_open(folder / _WEIGHTS, framework="pt") as weights:
        parts = (weights.get_tensor(name) for name in weights.keys())  # noqa: SIM118 - it is no dictionary
        dtype = next(part.dtype for part in parts if part.is_floating_point())
    named = dict[str, torch.Tensor]()
    for name, weight in layer.state_dict().items():
        part, _, rest = name.partition(".")
        full = f"mtp.layers.0.{rest}" if part == "mtp_block" else f"mtp.{_NAMES[part]}.{rest}"
        named[full] = weight.detach().to(dtype).contiguous()
    (folder / SUBFOLDER).mkdir(exist_ok=True)
    file = folder / SUBFOLDER / _WEIGHTS
    save_file(named, file, metadata={"format": "pt"})
    file.chmod(0o644)
    config.write_text(
        json.dumps({**json.loads(config.read_text("utf-8")), "num_mtp_layers": 1}, indent=2) + "\n", "utf-8"
    )


@app.command()
def main(
    model: Annotated[Path, typer.Option(help="Folder of the model: a Llama, one safetensors file.")],
    out: Annotated[Path, typer.Option(help="Folder to write the model with its layer to; may be the same.")],
    minutes: Annotated[float, typer.Option(help="Minutes of training, after the texts are written.")] = 60.0,
    texts: Annotated[int, typer.Option(help="Texts that the model writes.")] = 3072,
    tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of texts, projection and order.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 2,
) -> None:
    """Train an MTP layer on texts that a model writes itself, and write both as one checkpoint."""
    torch.set_num_threads(threads)
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    written = written_texts(base, texts, tokens, seed)
    layer, held = new_layer(base, seed), written[: max(1, texts // 48)]
    train_layer(layer, base, written[len(held) :], seconds=60 * minutes, keep=lambda: export_layer(layer, model, out))
    with torch.no_grad():
        _, agreements = losses(layer.eval(), base, held, shares=None)
    export_layer(layer, model, out)
    typer.echo(f"{out}: agreement on texts held out, by level: {', '.join(f'{each:.3f}' for each in agreements)}")


if __name__ == "__main__":
    app()

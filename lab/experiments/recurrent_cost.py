"""Cost of a tree of tokens in one recurrent layer, without the layer's projections.

    OMP_NUM_THREADS=1 python lab/experiments/recurrent_cost.py [--nodes 8,16,32,64]
    python lab/experiments/recurrent_cost.py --traffic

The sizes are those of a gated DeltaNet layer of Qwen3.5-9B, and of a Mamba 2 layer of Nemotron 3 Nano 30B-A3B. Trees
are random. Their windows, convolution, states and the folding of a path are timed; beside them one token on the state,
by transformers' own function. Milliseconds: the median, and the quarters around it. `--traffic` computes on paper what
all recurrent layers of these models read and write a step and row, in megabytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from lade.backends.recurrent.cores import delta_rule, mamba2
from lade.backends.recurrent.tree_pass import TreePass, convolution, gather_columns
from lade.decoding.tree import TokenTree

WIDTH = 4
"""Inputs that a convolution sees."""
Core = Callable[[TreePass], Any]


@dataclass(frozen=True)
class Layer:
    """A recurrent layer.

    Attributes:
        channels: of its convolution.
        state: `[1, ...]`, of the text.
        core: for a number of nodes, what computes them from random inputs.
        token: computes one token on the state.
    """

    channels: int
    state: torch.Tensor
    core: Callable[[int], Core]
    token: Callable[[], Any]


def delta_net(heads: int = 32, dim: int = 128) -> Layer:
    """Gated DeltaNet, half as many heads for queries and keys."""
    state = torch.randn(1, heads, dim, dim)

    def inputs(nodes: int, key_heads: int) -> list[torch.Tensor]:
        gates = -torch.rand(1, nodes, heads), torch.rand(1, nodes, heads)
        return [*torch.randn(2, 1, nodes, key_heads, dim), torch.randn(1, nodes, heads, dim), *gates]

    def core(nodes: int) -> Core:
        given = inputs(nodes, heads // 2)
        return lambda tree_pass: delta_rule(
            tree_pass, _unused, *given, initial_state=state, use_qk_l2norm_in_kernel=True
        )

    one, options = inputs(1, heads), {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return Layer(
        2 * heads * dim,
        state,
        core,
        lambda: qwen.torch_recurrent_gated_delta_rule(*one, initial_state=state, **options),
    )


def state_space(heads: int = 64, dim: int = 64, size: int = 128, groups: int = 8) -> Layer:
    """Mamba 2."""
    state, decay, ones = torch.randn(1, heads, dim, size), -torch.rand(heads), torch.ones(heads)

    def core(nodes: int) -> Core:
        given = torch.randn(1, nodes, heads, dim), torch.rand(1, nodes, heads), decay
        keys = torch.randn(2, 1, nodes, groups, size)
        return lambda tree_pass: mamba2(tree_pass, _unused, *given, *keys, initial_states=state, D=ones)

    wide = torch.rand(1, heads, dim), decay[:, None, None].expand(-1, dim, size)  # as the mixer has them
    one = torch.randn(1, heads, dim), *wide, *torch.randn(2, 1, groups, size), ones[:, None].expand(-1, dim)
    return Layer(
        heads * dim + 2 * groups * size,
        state,
        core,
        lambda: nemotron.mamba2_selective_state_update(state, *one),
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes that the recurrent layers of a model move for one row; states and nodes are float32.

    Attributes:
        layers: how many of them there are.
        heads, keys, values: of a state `[heads, keys, values]`.
        channels: of the convolution.
    """

    layers: int
    heads: int
    keys: int
    values: int
    channels: int

    @property
    def state(self) -> int:
        """Bytes of the states."""
        return 4 * self.layers * self.heads * self.keys * self.values

    def nodes(self, count: int) -> int:
        """Bytes that are written for the nodes of a tree until one path of them goes into the states."""
        return 4 * self.layers * (count * self.heads * (self.keys + self.values + 1) + (count + WIDTH) * self.channels)

    def token(self) -> float:
        """Megabytes of a token by plain decoding: states are read and written."""
        return 2 * self.state / 1e6

    def tree(self, count: int) -> float:
        """Megabytes of a tree: outputs read the states, folding reads and writes them; nodes are written and read."""
        return (3 * self.state + 2 * self.nodes(count)) / 1e6

    def captured(self, count: int) -> float:
        """The same if one kernel folded the last path in where it reads the state for the next tree."""
        return (2 * self.state + 2 * self.nodes(count)) / 1e6


TRAFFIC = {
    "gated DeltaNet, Qwen3.5-9B": Traffic(layers=24, heads=32, keys=128, values=128, channels=8192),
    "Mamba 2, Nemotron 3 Nano": Traffic(layers=23, heads=64, keys=128, values=64, channels=6144),
}


def tree_of(nodes: int) -> TokenTree:
    """A random tree, about as deep as those that are drafted."""
    tree, rng = TokenTree(0), random.Random(0)
    while len(tree) < nodes:
        tree.add(max(0, len(tree) - rng.randrange(1, 5)), len(tree), "memory")
    return tree


def a_pass(layer: Layer, nodes: int) -> Callable[[], Any]:
    """A pass over a tree of that size, with its longest path folded in."""
    cached, inputs = torch.randn(1, layer.channels, WIDTH), torch.randn(1, nodes, layer.channels).mT
    weight = torch.randn(layer.channels, WIDTH)
    core, tree_pass, last = layer.core(nodes), TreePass([tree_of(nodes)]), torch.tensor([nodes - 1])

    def call() -> Any:
        whole = torch.cat([cached.mT, inputs.mT], dim=1)  # as the cache layer does
        convolution(tree_pass, _unused, whole.mT, weight, None, "silu")
        cached.copy_(gather_columns(whole, tree_pass.windows(WIDTH, WIDTH, whole.device)[:, -1]).mT)
        core(tree_pass)[1].fold(layer.state, last)

    return call


def timed(call: Callable[[], Any], times: int) -> str:
    """Milliseconds of a call, after one that does not count."""
    call()
    milliseconds = []
    for _ in range(times):
        start = perf_counter()
        call()
        milliseconds.append(1e3 * (perf_counter() - start))
    low, middle, high = quantiles(milliseconds, n=4)
    return f"{middle:6.2f} ({low:.2f} to {high:.2f})"


def _unused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the function for a text is not called for a tree")


def main(
    nodes: Annotated[str, typer.Option(help="Sizes of trees.")] = "8,16,32,64",
    times: Annotated[int, typer.Option(help="How often each is timed.")] = 40,
    traffic: Annotated[bool, typer.Option(help="Compute bytes instead.")] = False,
) -> None:
    """Time a token, and trees of several sizes."""
    sizes = [int(size) for size in nodes.split(",")]
    if traffic:
        for name, moved in TRAFFIC.items():
            typer.echo(f"{name}\n  state {moved.state / 1e6:.1f}, token {moved.token():.1f}")
            for size in sizes:
                typer.echo(f"  {size:5} {moved.tree(size):.1f}, in one kernel {moved.captured(size):.1f}")
        return
    torch.manual_seed(0)
    with torch.no_grad():
        for name, layer in (("gated DeltaNet, 9B", delta_net()), ("Mamba 2, 30B-A3B", state_space())):
            typer.echo(f"{name}\n  token {timed(layer.token, times)}")
            for size in sizes:
                typer.echo(f"  {size:5} {timed(a_pass(layer, size), times)}")


if __name__ == "__main__":
    typer.run(main)

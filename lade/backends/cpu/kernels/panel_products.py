"""Blocked GEMM with weights in panels: arguments and epilogue."""

from __future__ import annotations

from typing import Any, NamedTuple

from lade.backends.cpu.kernels.instructions import copy, field, load_one, stack_memory
from lade.backends.cpu.kernels.lanes import (
    LANES,
    LINE,
    broadcast,
    load_float32,
    load_int32,
    load_padded,
    plus,
    store_rounded,
    times,
)
from lade.compilation import inlined


class PanelProduct(NamedTuple):
    """Arguments of a GEMM with weights in panels, all integers; addresses are 0 where an operand is absent.

    Attributes:
        x: address of the rows in blocks of inputs: see `RowQuantisation` for int8 codes, `RowBlocks` for bfloat16.
        scales: address of the rows' scales, `[rows]` float32; int8 only.
        weight: address of the panels.
        steps: address of the weights' scales, `[outputs]` float32; int8 only.
        bias: address of the bias, `[outputs]`.
        bias_kind: dtype code of the bias, see `dtype_code`.
        out: address of the result, `[rows, outputs]`, contiguous: sums, scaled by `steps` and `scales` if given, plus
            the bias.
        kind: dtype code of `out`.
        rows, blocks, outputs: sizes; a block is 64 bytes of inputs.
        row_group, panel_group: rows (whole groups) and panels per part of the work; with few rows, each part takes all
            of them.
        together: number of rows interleaved in a group.
        start: address of the initial sums for unsigned codes, `[outputs padded]` int32: -128 times the sum of an
            output's weights, since 128 stands for an input of zero.
    """

    x: int
    scales: int
    weight: int
    steps: int
    bias: int
    bias_kind: int
    out: int
    kind: int
    rows: int
    blocks: int
    outputs: int
    row_group: int
    panel_group: int
    together: int
    start: int


@inlined
def load_product(address: Any) -> Any:
    """Load the arguments from the fields after the team header."""
    places = field(address, 2), field(address, 3), field(address, 4), field(address, 5), field(address, 6)
    more = field(address, 7), field(address, 8), field(address, 9), field(address, 10), field(address, 11)
    last = field(address, 12), field(address, 13), field(address, 14), field(address, 15), field(address, 16)
    return PanelProduct(*places, *more, *last)


@inlined
def write_results(product: Any, row: Any, rows: Any, output: Any, sums: Any, columns: Any) -> None:
    """Epilogue: scale sums `[rows, columns]`, add the bias, round and store them.

    A partial vector of outputs goes through `spare`, so that nothing past it is read or written.
    """
    spare, item, bias_item = stack_memory(LINE), 2 if product.kind else 4, 2 if product.bias_kind else 4
    for column in range(0, min(columns, product.outputs - output), LANES):
        place = output + column
        count = min(LANES, product.outputs - place)
        steps = load_float32(sums)  # placeholder of the right type; overwritten wherever it is used
        if product.steps:
            steps = load_padded(product.steps + 4 * place, 0, count, spare)
        added = steps
        if product.bias:
            added = load_padded(product.bias + bias_item * place, product.bias_kind, count, spare)
        for at in range(row, row + rows):
            found = load_float32(sums + 4 * ((at - row) * columns + column))
            if product.steps:
                scale = broadcast(load_one(product.scales + 4 * at))
                found = times(times(load_int32(sums + 4 * ((at - row) * columns + column)), steps), scale)
            if product.bias:
                found = plus(found, added)
            to = product.out + item * (at * product.outputs + place)
            if count < LANES:
                store_rounded(spare, found, product.kind)
                copy(to, spare, item * count)
            else:
                store_rounded(to, found, product.kind)

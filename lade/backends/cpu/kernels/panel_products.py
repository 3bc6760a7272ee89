"""Products of rows and weights in panels: what is asked for, and what becomes of the sums."""

from __future__ import annotations

from typing import Any, NamedTuple

from lade.backends.cpu.kernels.instructions import copy, field, load_one, room
from lade.backends.cpu.kernels.lanes import (
    LANES,
    LINE,
    in_all_lanes,
    plus,
    put_as,
    take_float32,
    take_some,
    take_sums,
    times,
)
from lade.compilation import inlined


class PanelProduct(NamedTuple):
    """Rows by the weights of a layer.

    Attributes:
        x: where the rows lie, in blocks of their inputs: see `Coding` for codes, `Layout` for bfloat16.
        scales: of codes, `[rows]` float32, what a step of each row is worth.
        weight: the panels.
        steps: of codes, `[outputs]` float32, what a step of each output's codes is worth; 0 of numbers.
        bias: `[outputs]`; 0 if there is none.
        bias_kind: of its dtype, see `kind_of`.
        out: `[rows, outputs]`, contiguous, what becomes of it: sums, times `steps` and `scales` if there are any, plus
            the bias.
        kind: of its dtype.
        rows, blocks, outputs: how many; 64 bytes of inputs make a block.
        row_group, panel_group: so many rows, whole groups of them, and so many panels make one part of the work; of few
            rows one part has all.
        together: how many rows lie together.
        start: of unsigned codes, what the sums begin with, `[outputs filled up]` int32: minus 128 times the sum of an
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
def asked_for(address: Any) -> Any:
    """The product, from the fields behind the header that a team is given."""
    places = field(address, 2), field(address, 3), field(address, 4), field(address, 5), field(address, 6)
    more = field(address, 7), field(address, 8), field(address, 9), field(address, 10), field(address, 11)
    last = field(address, 12), field(address, 13), field(address, 14), field(address, 15), field(address, 16)
    return PanelProduct(*places, *more, *last)


@inlined
def give_out(product: Any, row: Any, rows: Any, output: Any, sums: Any, columns: Any) -> None:
    """Scale sums `[rows, columns]`, add the bias, and round them into their place.

    What is left over of the outputs goes by way of `spare`, so that nothing behind them is read or written.
    """
    spare, item, bias_item = room(LINE), 2 if product.kind else 4, 2 if product.bias_kind else 4
    for column in range(0, min(columns, product.outputs - output), LANES):
        place = output + column
        count = min(LANES, product.outputs - place)
        steps = take_float32(sums)  # which is used only if it becomes what it is called, and so is the next one
        if product.steps:
            steps = take_some(product.steps + 4 * place, 0, count, spare)
        added = steps
        if product.bias:
            added = take_some(product.bias + bias_item * place, product.bias_kind, count, spare)
        for at in range(row, row + rows):
            found = take_float32(sums + 4 * ((at - row) * columns + column))
            if product.steps:
                scale = in_all_lanes(load_one(product.scales + 4 * at))
                found = times(times(take_sums(sums + 4 * ((at - row) * columns + column)), steps), scale)
            if product.bias:
                found = plus(found, added)
            to = product.out + item * (at * product.outputs + place)
            if count < LANES:
                put_as(spare, found, product.kind)
                copy(to, spare, item * count)
            else:
                put_as(to, found, product.kind)

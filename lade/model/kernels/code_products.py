"""Products of rows and weights in int8 codes: what is asked for, and what becomes of the sums."""

from __future__ import annotations

from typing import Any, NamedTuple

from lade.decoding.compilation import inlined
from lade.model.kernels.instructions import copy, field, load_one, room
from lade.model.kernels.lanes import LANES, in_all_lanes, plus, put_as, take_some, take_sums, times
from lade.model.kernels.tiles import ROW_BYTES


class CodeProduct(NamedTuple):
    """Rows of codes by the weights of a layer in int8.

    Attributes:
        codes, scales: where the rows lie, see `Coding`; more than 16 of them in room for a multiple of 32.
        weight: the panels.
        steps: `[outputs]` float32, what a step of each output's codes is worth.
        bias: `[outputs]`; 0 if there is none.
        bias_kind: of its dtype.
        out: `[rows, outputs]`, contiguous, what becomes of it: sums, times `steps`, times `scales`, plus the bias.
        kind: of its dtype.
        rows, blocks, outputs: how many; 64 inputs make a block.
        row_group, panel_group: so many rows, a multiple of 32, and so many panels make one part of the work.
    """

    codes: int
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


@inlined
def code_product(address: Any) -> Any:
    """From the fields behind the header that a team is given."""
    codes, scales, weight, steps = field(address, 2), field(address, 3), field(address, 4), field(address, 5)
    bias, bias_kind, out, kind = field(address, 6), field(address, 7), field(address, 8), field(address, 9)
    sizes = field(address, 10), field(address, 11), field(address, 12), field(address, 13), field(address, 14)
    return CodeProduct(codes, scales, weight, steps, bias, bias_kind, out, kind, *sizes)


@inlined
def give_sums_out(product: Any, row: Any, rows: Any, output: Any, sums: Any, columns: Any) -> None:
    """Scale sums `[rows, columns]`, add the bias, and round them into their place.

    What is left over of the outputs goes by way of `spare`, so that nothing behind them is read or written.
    """
    spare, item, bias_item = room(ROW_BYTES), 2 if product.kind else 4, 2 if product.bias_kind else 4
    for column in range(0, min(columns, product.outputs - output), LANES):
        place = output + column
        count = min(LANES, product.outputs - place)
        steps = take_some(product.steps + 4 * place, 0, count, spare)
        added = steps
        if product.bias:
            added = take_some(product.bias + bias_item * place, product.bias_kind, count, spare)
        for at in range(row, row + rows):
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

"""Packed weights: oneDNN's layout, memory on huge pages, pickling, detection of changes; and weights in panels.

Drawings of panels, and of the groups in which rows pass through them, are in `lade/native/cpu_dots.h`. A product of a
few rows with a small weight takes some 10 us, as long as a few calls of Python. So what calls have in common, such as
how their work is split, is prepared once per weight and number of rows.
"""

from __future__ import annotations

import mmap
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from lade.backends.cpu.kernels import At, Stages, address_of, dtype_code, is_plain, kernel, refuse
from lade.errors import UnsupportedModelError
from lade.model.config import dtype_name

MOST_INPUTS = 4096  # on processors with AMX, weights of up to this many inputs are laid out in blocks of 64 outputs
CHUNK = 2**26  # bytes requested from the system at a time; pages that are never written take no memory
UNPACK_REMEDY = "call lade.unpack(model) first"


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight, `[out, in]`, in oneDNN's layout.

    On processors with AMX, oneDNN lays a bfloat16 weight out in blocks of 32 outputs, unless it is told to expect a
    single row. It then uses blocks of 64, which are an eighth faster for up to 16 rows and, up to `MOST_INPUTS` inputs,
    round alike for many more row counts. Beyond that, fewer counts round alike, so oneDNN's own choice is kept.
    """
    in_tiles = weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    rows = (1,) if in_tiles and weight.shape[1] <= MOST_INPUTS else ()
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, *rows)
    return packed


class HugePages:
    """Memory pool on huge pages, handed out in consecutive pieces; a chunk is freed with the last of its pieces.

    Copies start empty.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.int8, device="cpu")

    def __reduce__(self) -> tuple[type[HugePages], tuple[()]]:
        return HugePages, ()

    def take(self, size: int) -> torch.Tensor:
        """Return `size` zero bytes, a multiple of 64 and aligned to 64: `[size]` int8."""
        if size > len(self._left):
            self._left = _chunk(max(size, CHUNK))
        piece, self._left = self._left[:size], self._left[size:]
        return piece


def _chunk(size: int) -> torch.Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.int8, device="cpu")
    chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # systems without huge pages
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(chunk, dtype=torch.int8)


class PackedWeight(nn.Parameter):
    """The `weight` of a packed layer whose original was freed; it can be read, but neither replaced nor moved."""

    @property
    def data(self) -> torch.Tensor:
        """The values, in the packed layout."""
        return super().data

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        raise UnsupportedModelError("the weight of a packed layer cannot be replaced", UNPACK_REMEDY)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Convert like any tensor if dtype and device stay the same; accelerate calls this when it offloads a layer."""
        check_move(lambda tensor: tensor.to(*args, **kwargs), self.dtype)
        return super().to(*args, **kwargs)


def check_move(fn: Any, dtype: torch.dtype) -> None:
    """Raise `UnsupportedModelError` if `fn` changes the dtype or device of a tensor."""
    after = fn(torch.empty(0, dtype=dtype, device="cpu"))
    if after.dtype != dtype or after.device.type != "cpu":
        raise UnsupportedModelError(
            f"layers packed in {dtype_name(dtype)} for the CPU "
            f"cannot become {dtype_name(after.dtype)} on {after.device}",
            f"{UNPACK_REMEDY}, and pack it again afterwards",
        )


def like(weight: nn.Parameter, data: torch.Tensor, kind: type[nn.Parameter] = nn.Parameter) -> nn.Parameter:
    """Return a parameter with other data and the attributes that transformers and others set on the original."""
    parameter = kind(data, requires_grad=weight.requires_grad)
    parameter.__dict__.update(weight.__dict__)
    return parameter


class ByValue:
    """Pickles a tensor by its bytes, and unpickles as an ordinary tensor.

    Torch passes tensors to a starting process in shared memory, which must live until then. A temporary tensor would be
    gone by that time, so its bytes are sent instead.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._tensor.contiguous().view(torch.uint8).numpy(), self._tensor.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._tensor


def _arrived(numbers: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(numbers).view(dtype)


def state_of(weight: Any) -> tuple[int, int]:
    """Return address and version of a dense weight; if either differs later, the weight may have changed."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if tensors are equal bit for bit: NaN equals itself, and zeros are signed."""
    as_integers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(as_integers), other.contiguous().view(as_integers))


BLOCK = 64  # bytes of consecutive inputs, of one row or one output, in a block
DOT_PANEL, TILE_PANEL = 16, 64  # outputs per panel of dot products, and of AMX tiles
TILE_ROWS = 16  # rows of a tile
_WORD = 4  # bytes of the inputs of an output that an instruction adds up
_COLUMNS = BLOCK // _WORD  # outputs of a tile, or of a line of a panel
_NEAR = 2**19  # bytes of rows that stay in a core's cache
_MANY_INPUTS = 2**12  # least inputs per thread
_SHARES = 4  # parts per thread, so that a delayed thread does not hold up the others
_PART_WORK = 2**22  # bytes of panels times rows, at most, for the same reason: some 50 us


class RowGroups(NamedTuple):
    """Numbers of rows that pass through panels together, and how a product is split."""

    sizes: tuple[int, ...]  # ascending; few rows, up to the last of them, make one group of the least that holds them
    together: int  # rows per group if there are more
    columns: int  # panels that such a group passes through at a time
    few: int  # number of rows up to which each part of the work has all of them
    near_bytes: int  # bytes of panels that stay in a core's cache
    least_bytes: int  # least bytes of panels per part of the work with all rows

    def together_for(self, rows: int) -> int:
        """Return the rows interleaved in a group, for a product of `rows` rows; the last group may be padded."""
        return next((size for size in self.sizes if rows <= size), self.together)

    def shares(self, rows: int, panels: int, blocks: int, panel_bytes: int) -> tuple[int, int]:
        """Return the rows and panels per part of the work."""
        if rows <= self.few:
            share = min(-(-panels // (_SHARES * torch.get_num_threads())), _PART_WORK // (rows * panel_bytes))
            return rows, max(share, -(-self.least_bytes // panel_bytes))
        near = max(self.together, _NEAR // (blocks * BLOCK) // self.together * self.together)
        columns = min(self.near_bytes, _PART_WORK // near) // panel_bytes // self.columns * self.columns
        return near, max(self.columns, columns)


DOTS = RowGroups((1, 2, 4, 6, 8, 12, 16, 24), 8, 2, 24, 2**18, 2**16)  # groups of dot products
WIDE_CODES = RowGroups((1, 2, 4, 6, 8, 12, 16), 16, 1, 32, 2**17, 2**15)
NARROW_CODES = RowGroups((1, 2, 4), 4, 1, 8, 2**17, 2**15)
"""Groups of rows of products of codes for 32 registers of 64 bytes, and for 16 of 32 bytes."""


def has_dots() -> bool:
    """Return True if there are dot products of bfloat16, which need AVX512-BF16."""
    return kernel("multiply_few").available


def in_panels(weight: torch.Tensor, pages: HugePages | None = None, panel: int = TILE_PANEL) -> torch.Tensor:
    """Return a bfloat16 weight `[out, in]` in panels `[out / panel, in / block, panel / 16, 16, block]`, with padding.

    A panel's block of 32 inputs is one or more tiles of 16 outputs; a row of a tile holds the same two inputs of each
    output in turn. There are `TILE_PANEL` or `DOT_PANEL` outputs per panel. Without `pages` it is in ordinary memory.
    """
    outputs, inputs = weight.shape
    block = BLOCK // weight.element_size()
    filled = torch.nn.functional.pad(weight, (0, -inputs % block, 0, -outputs % panel)).contiguous()
    words = filled.view(torch.int32).view(-1, panel // _COLUMNS, _COLUMNS, filled.shape[1] // block, _COLUMNS)
    words = words.permute(0, 3, 1, 4, 2)
    size = filled.nbytes
    room = torch.empty(size, dtype=torch.int8, device="cpu") if pages is None else pages.take(size)
    return room.view(torch.int32).view(words.shape).copy_(words).view(weight.dtype)


def out_of_panels(panels: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """Invert `in_panels`: return the weight `[out, in]`."""
    words = panels.view(torch.int32).permute(0, 2, 4, 1, 3)
    filled = words.reshape(panels.shape[2] * _COLUMNS * len(panels), -1).contiguous().view(panels.dtype)
    return filled[:outputs, :inputs].contiguous()


_CODED = "float32, bfloat16 or float16"  # dtypes of rows that are rounded to codes
_FACTS = 32  # bytes of the numbers that are noted of each block of a row in codes
PREPARED_ROWS = 128  # most rows whose calls are kept: a prompt's number of rows may never come again


def has_block_kernels() -> bool:
    """Return True if the compiled library is there, which has kernels of codes for every processor."""
    return kernel("multiply_int8").available


class _Split(NamedTuple):
    """How rows pass through panels."""

    kernel: str
    together: int  # rows interleaved in a group
    row_group: int  # rows per part of the work
    panel_group: int  # panels per part of the work


class Blocks(NamedTuple):
    """Where rows lie in blocks, and what is noted of their codes; 0 for none."""

    rows: At
    facts: At | int


class PanelWeight:
    """A weight `[outputs, inputs]` in panels: bfloat16 from `in_panels`, or codes from `BlockCodes`.

    Args:
        panels: the weight, with padding; raises `ValueError` if it has fewer outputs.
        codes: format of the codes, see `BlockCodes.name`; empty for bfloat16.
    """

    instructions = ""  # of the kernels of its products, see `kernel`

    def __init__(self, panels: torch.Tensor, outputs: int, inputs: int, *, codes: str = "") -> None:
        self.panels, self.outputs, self.inputs, self.codes = panels, outputs, inputs, codes
        self._prepared: dict[Hashable, Stages] = {}
        most = len(panels) * DOT_PANEL * (1 if codes else panels.shape[2])
        if outputs > most:
            raise ValueError(f"outputs is {outputs}: these panels have up to {most}")

    def product(
        self,
        x: torch.Tensor,  # [..., in]: bfloat16 for bfloat16 weights; float32, bfloat16 or float16 for codes
        bias: torch.Tensor | None = None,  # [out], in any of these dtypes
        dtype: torch.dtype | None = None,  # of the result, any of these; None for that of x
    ) -> torch.Tensor:
        """Multiply rows by the weight, and add a bias: `[..., out]`; see `check` for the errors raised."""
        self.check(x, bias)
        x, bias = x.contiguous(), None if bias is None else bias.contiguous()
        out = torch.empty(*x.shape[:-1], self.outputs, dtype=dtype or x.dtype, device="cpu")
        if x.numel():
            self._multiply(x, bias, out)
        return out

    def check(self, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Raise `ValueError` unless rows and bias have the dtype, device and shape that `product` takes."""
        half = torch.bfloat16
        fits = is_plain(x) and x.dim() and x.shape[-1] == self.inputs > 0 and (self.codes or x.dtype == half)
        own = bias is None or (is_plain(bias) and bias.shape == (self.outputs,))
        if not (fits and own and (bias is None or self.codes or bias.dtype == half)):
            takes = f"{_CODED if self.codes else half} on the CPU, [..., {self.inputs}] and [{self.outputs}]"
            refuse("the panel product", takes.replace("torch.", ""), x=x, panels=self.panels, bias=bias)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Compute `product` of contiguous tensors."""
        rows, kind, out_kind = x.numel() // self.inputs, dtype_code(x.dtype), dtype_code(out.dtype)
        bias_kind = 0 if bias is None else dtype_code(bias.dtype)
        key = rows, torch.get_num_threads(), kind, out_kind, bias_kind
        stages = self._prepared.get(key)
        if stages is None:
            stages = Stages()
            blocks = self.add_rows(stages, rows, At(1), kind)
            self.add_product(stages, rows, blocks, 3, At(2), out_kind, bias_kind)
            if rows <= PREPARED_ROWS:
                self._prepared[key] = stages
        memory = torch.empty(stages.size, dtype=torch.int8, device="cpu")
        stages.run((memory.data_ptr(), x.data_ptr(), out.data_ptr(), *self.addresses(bias)))

    def addresses(self, bias: torch.Tensor | None) -> tuple[int, int]:
        """Return the addresses of weight and bias now: tensors move when they are sent to another process."""
        return self.panels.data_ptr(), address_of(bias)

    def add_rows(self, stages: Stages, rows: int, x: At, kind: int) -> Blocks:
        """Add the stage that lays rows at a place out for a product, and return where they then lie."""
        split = self._split(rows)
        width = self.inputs * (1 if self.codes else self.panels.itemsize)
        if not self.codes and rows == 1 and width % BLOCK == 0:  # such a row lies as in blocks
            return Blocks(x, 0)
        padded = -(-rows // split.together) * split.together  # the last group is filled up
        count = padded * self.panels.shape[1]
        to, facts = stages.take(count * BLOCK), stages.take(count * _FACTS) if self.codes else 0
        fields = x, to, facts, kind, rows, self.inputs, split.together  # a RowBlocks, see cpu.h
        parts = max(1, min(rows, _SHARES * torch.get_num_threads(), rows * width // _MANY_INPUTS))
        stages.add(kernel("quantise_rows" if self.codes else "block_rows"), parts, fields)
        return Blocks(to, facts)

    def add_product(
        self,
        stages: Stages,
        rows: int,
        blocks: Blocks,
        own: int,
        out: At,
        kind: int,
        bias_kind: int,
        *,
        joined: bool = False,
    ) -> None:
        """Add the stage that multiplies rows by this weight; `own` is the index of the first of its `addresses`.

        The rows may be laid out for another weight of the same kind and number of inputs. If that was multiplied in the
        stage before, this one may be `joined` to it.
        """
        split, (count, wide, *_) = self._split(rows), self.panels.shape
        fields = (  # a PanelProduct, see cpu.h
            *(blocks.rows, blocks.facts, At(own), At(own + 1), out, bias_kind, kind),
            *(rows, wide, self.outputs, split.row_group, split.panel_group, split.together),
        )
        parts = -(-rows // split.row_group) * -(-count // split.panel_group)
        stages.add(kernel(split.kernel, self.instructions), parts, fields, joined=joined)

    def _split(self, rows: int) -> _Split:
        (count, blocks, *_), panel = self.panels.shape, self.panels[0]
        groups = code_groups(self.instructions) if self.codes else DOTS
        name = self.codes or ("few" if rows <= groups.few else "many")
        together = groups.together_for(rows)
        shares = groups.shares(rows, count, blocks, panel.nbytes)
        return _Split(f"multiply_{name}", together, *shares)


def code_groups(instructions: str = "") -> RowGroups:
    """Return the groups of rows of the kernels of codes for some instructions; empty for the best of this processor."""
    wide = instructions.startswith("avx512") if instructions else kernel("multiply_int8", "avx512").available
    return WIDE_CODES if wide else NARROW_CODES

"""An int8 linear layer: quantised inputs, shared between layers, and exact integer sums.

What comes out has the bits of products by oneDNN: integer sums are exact, and the rest is rounded in the same steps.

Inputs are rounded to int8 too, token by token, and integers are multiplied: by what is compiled here on processors with
tiles (AMX) or dot products (AVX-512 with VNNI), elsewhere by oneDNN. An integer sum is exact, whatever the kernel and
however many rows there are, so a row's result does not depend on the rows beside it, bit for bit.

The scheme, a scale for each output of the weights and one for each token of the inputs, is that of Dettmers et al.,
"LLM.int8()" (2022), without its outliers, and of Xiao et al., "SmoothQuant" (2022), per-token dynamic.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch import nn

from lade.backends.cpu.kernels import dot_products, tile_code_products
from lade.backends.cpu.kernels.codes import CODES, Coding, code_rows
from lade.backends.cpu.kernels.dots import DOT_PANEL, FEW, rows_together
from lade.backends.cpu.kernels.kinds import is_plain, kind_of, refuse
from lade.backends.cpu.kernels.panel_products import PanelProduct
from lade.backends.cpu.kernels.tiles import PANEL, ROWS
from lade.backends.cpu.packing.integer_products import ZERO_POINT, Codes, input_dtype, multiplied, prepacked, quantised
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cpu.packing.panel_products import groups, panel_for
from lade.backends.cpu.packing.tile_products import in_panels, out_of_panels
from lade.backends.cpu.packing.weight import ByValue, HugePages, PackedWeight, like
from lade.backends.cpu.worker_threads import in_team
from lade.errors import UnsupportedModelError

_NEAR, _GROUP = 2**20, 2**18  # bytes of rows and of weights that a core's cache keeps beside tiles
_MANY_WEIGHTS, _MANY_INPUTS = 2**16, 2**15  # that are worth a thread of their own
_SHARES = 4  # parts for each thread, which may be held up


def coded(x: torch.Tensor, panel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round inputs as `quantised` in codes.py does, and lay them out for weights in panels.

    Args:
        x: `[..., in]`, float32, bfloat16 or float16.
        panel: outputs of a panel. For tiles codes are signed, 16 rows lie together, and there is room for a multiple of
            32 where there are more; for dot products they are unsigned.

    Returns:
        Codes as `Coding` lays them out, and what a step of each row is worth, `[rows]` float32.

    Raises:
        ValueError: x is of another dtype or on another device, or has no inputs.
    """
    if not (is_plain(x) and x.dim() and x.shape[-1]):
        refuse("rounding to int8", "tensors [..., in] on the CPU", x=x)
    x, inputs = x.contiguous(), x.shape[-1]
    rows = x.numel() // inputs
    if panel == PANEL:
        together, step, zero = min(rows, ROWS), rows if rows <= ROWS else 2 * ROWS, 0
    else:
        together = step = rows_together(rows)
        zero = ZERO_POINT
    codes = torch.empty(-(-rows // max(1, step)) * step * -(-inputs // CODES) * CODES, dtype=torch.int8)
    scales = torch.empty(rows)
    places = x.data_ptr(), kind_of(x.dtype), codes.data_ptr(), scales.data_ptr()
    parts = max(1, min(rows, _SHARES * torch.get_num_threads(), x.numel() // _MANY_INPUTS))
    in_team(code_rows, Coding(*places, rows, inputs, together, zero), parts, (x, codes, scales))
    return codes, scales


def first_sums(values: torch.Tensor) -> torch.Tensor:
    """What the sums of weights `[out, in]` begin with where inputs of zero are 128: `[out filled up]` int32."""
    sums = values.sum(-1, dtype=torch.int32).mul_(-ZERO_POINT)
    return torch.nn.functional.pad(sums, (0, -len(values) % DOT_PANEL))


def multiplied_in_panels(
    codes: torch.Tensor,
    scales: torch.Tensor,
    panels: torch.Tensor,
    start: torch.Tensor,
    steps: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Integer sums, times the scales of outputs and of rows, plus the bias.

    Args:
        codes: of `coded`, for panels of as many outputs.
        scales: likewise.
        panels: of `in_panels`.
        start: of `first_sums`; unused by tiles.
        steps: `[out]` float32, of the weights.
        bias: `[out]`, in one of the dtypes of inputs.
        out: `[..., out]`, contiguous, in one of these dtypes: is filled in.

    Returns:
        `out`.

    Raises:
        ValueError: the bias is of another dtype, device or shape.
    """
    if bias is not None and not (is_plain(bias) and bias.shape == (out.shape[-1],)):
        refuse("the product of codes", "a bias [out] on the CPU", out=out, bias=bias)
    rows = scales.numel()
    if not rows:
        return out
    count, blocks, tiles, *_ = panels.shape
    if tiles == 1:
        few, together = FEW, rows_together(rows)
        kernels = dot_products.multiply_few_codes, dot_products.multiply_many_codes
        row_group, panel_group = groups(rows, count, blocks)
    else:
        few, together = ROWS, min(rows, ROWS)
        kernels = tile_code_products.multiply_few_codes, tile_code_products.multiply_many_codes
        row_group, panel_group = _tile_groups(rows, count, blocks)
    bias = None if bias is None else bias.contiguous()
    fields = PanelProduct(
        *(codes.data_ptr(), scales.data_ptr(), panels.data_ptr(), steps.data_ptr()),
        *((0, 0) if bias is None else (bias.data_ptr(), kind_of(bias.dtype))),
        *(out.data_ptr(), kind_of(out.dtype), rows, blocks, out.shape[-1], row_group, panel_group),
        *(together, start.data_ptr()),
    )
    parts = -(-rows // row_group) * -(-count // panel_group)
    in_team(kernels[rows > few], fields, parts, (codes, scales, panels, start, steps, bias, out))
    return out


def _tile_groups(rows: int, panels: int, blocks: int) -> tuple[int, int]:
    """How many rows and how many panels make one part of the work in tiles."""
    size, threads = blocks * CODES * PANEL, torch.get_num_threads()
    if rows <= ROWS:
        return rows, max(-(-panels // (_SHARES * threads)), -(-_MANY_WEIGHTS // size))
    step = 2 * ROWS
    return max(step, _NEAR // (blocks * CODES) // step * step), max(1, _GROUP // size)


TILES: Literal["tiles"] = "tiles"
DOTS: Literal["dots"] = "dots"
"""Codes for products of our own; the other forms are dtypes of inputs that oneDNN multiplies."""

Form = torch.dtype | Literal["tiles", "dots"]

PANELS: dict[Form, int] = {TILES: PANEL, DOTS: DOT_PANEL}
"""Outputs of the panels that weights lie in."""


def input_form(inputs: int, outputs: int) -> Form:
    """The form that a layer of this size takes here. All give the same bits.

    Raises:
        UnsupportedModelError: oneDNN's are not exact, see `input_dtype`.
    """
    panel = panel_for(torch.int8)
    own = next((form for form, outputs_each in PANELS.items() if outputs_each == panel), None)
    return own or input_dtype(inputs, outputs)


def rounded(x: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of inputs `[..., in]`, and what a step is worth: of `coded`, or of `quantised`."""
    return coded(x, PANELS[form]) if isinstance(form, str) else quantised(x, form)


class _Rounded(NamedTuple):
    """An input, in which version it was rounded to what, and who has taken that: numbers of layers."""

    x: ref[torch.Tensor]
    version: int
    form: Form
    codes: torch.Tensor
    scale: torch.Tensor
    takers: set[int]


class SharedInputs:
    """The codes of what was rounded last, for all layers of a model that are fed the same tensor, one after the other.

    A layer takes them once, so that none is given codes of an earlier pass, whatever has been written into its input.
    Copies begin with none. Threads may disturb one another, and then round anew.
    """

    def __init__(self) -> None:
        self._last: _Rounded | None = None

    def __reduce__(self) -> tuple[type[SharedInputs], tuple[()]]:
        return SharedInputs, ()

    def rounded(self, x: torch.Tensor, form: Form, taker: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `rounded` in input_forms.py; not to be written into.

        Args:
            x: `[..., in]`.
            form: of the codes.
            taker: number of the layer.
        """
        if x.is_inference():  # it has no version
            return rounded(x, form)
        last = self._last
        same = last is not None and last.x() is x and (last.version, last.form) == (x._version, form)
        if last is not None and same and taker not in last.takers:
            last.takers.add(taker)
            return last.codes, last.scale
        codes, scale = rounded(x, form)
        self._last = _Rounded(ref(x), x._version, form, codes, scale, {taker})
        return codes, scale


MOST_INPUTS = 2**31 // (255 * 127)
"""Inputs of a layer whose sum of products fits into 32 bits whatever they are."""
MOVE_REMEDY = "give it an ordinary tensor on the CPU"
RELOAD_REMEDY = "load the model again, or pack it with keep_original=True to begin with"


class Int8Linear(PackedLinear):
    """A linear layer with weights in int8, by output, and inputs that are rounded to int8, by token.

    Args:
        layer: an `nn.Linear`, or a `Conv1D`, whose weight is transposed.
        keep: whether the layer's own weight stays beside the packed one.
        codes: of its weight, where they are known; else they are made of it.
        inputs: one for all layers of a model.
        pages: likewise.

    Raises:
        UnsupportedModelError: no form of its inputs is multiplied exactly here.

    Attributes:
        weight: the layer's own parameter where it is kept; else one in the packed layout, int8: `[in, out]` in
            oneDNN's, or panels.
    """

    _scale: torch.Tensor
    _zeros: torch.Tensor
    _form: Form
    _inputs: SharedInputs
    _memory: HugePages

    def __init__(
        self,
        layer: nn.Module,
        *,
        keep: bool,
        codes: Codes | None = None,
        inputs: SharedInputs | None = None,
        pages: HugePages | None = None,
    ) -> None:
        self.__dict__.update(_given=codes, _inputs=inputs or SharedInputs(), _memory=pages or HugePages())
        super().__init__(layer, keep=keep)

    @torch.no_grad()
    def _pack_weight(self) -> None:
        """Make the packed tensor, and give the dense `weight` up unless it is kept."""
        weight: Any = self._parameters["weight"]
        codes = self.__dict__.pop("_given", None) or Codes.of(self._turned(weight.detach()))
        form = input_form(self.in_features, self.out_features)
        panel = PANELS.get(form)
        packed = in_panels(codes.values, self._memory, panel) if panel else prepacked(codes.values)
        zeros = first_sums(codes.values) if panel else torch.zeros(self.out_features, dtype=torch.int)
        self.__dict__.update(_packed=packed, _scale=codes.scale, _zeros=zeros, _form=form)
        if not self.keeps_original:
            integers = PackedWeight(packed, requires_grad=False)  # gradients of integers there are none
            integers.__dict__.update(weight.__dict__)
            self._parameters["weight"] = integers
        self._note_packed(weight)

    def codes(self) -> Codes:
        """A copy of the weight's codes."""
        if self._form in PANELS:
            return Codes(out_of_panels(self._packed, self.out_features, self.in_features), self._scale)
        return Codes(self._packed.to_dense().t().contiguous(), self._scale)

    def kept_weight(self) -> torch.Tensor:
        """The weight that it was packed from, `[out, in]`, if `restorable`."""
        return self._turned(self._dense_parameter())

    def dense_weight(self) -> torch.Tensor:
        """What the codes stand for, in the layer's dtype: not what the weight was before."""
        return self._turned(self.codes().dense(self.dtype))

    @property
    def restorable(self) -> bool:
        """Whether the weight that it was packed from is still there."""
        return self.keeps_original

    @property
    def nbytes(self) -> int:
        """Bytes of the integers and their scales."""
        return self._packed.numel() + self._scale.nbytes

    def _dense_parameter(self) -> nn.Parameter:
        if not self.keeps_original:
            raise UnsupportedModelError("a layer packed in int8 cannot become what it was", RELOAD_REMEDY)
        return super()._dense_parameter()

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if not is_plain(x):
            what = f"a {type(x).__name__} on {x.device}"
            raise UnsupportedModelError(f"a layer packed in int8 for the CPU is fed {what}", MOVE_REMEDY)
        codes, scale = self._inputs.rounded(x, self._form, id(self))
        bias = self._parameters["bias"]
        if self._form in PANELS:
            out = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype)
            return multiplied_in_panels(codes, scale, self._packed, self._zeros, self._scale, bias, out)
        y = multiplied(codes, self._packed, self._scale, self._zeros).mul_(scale)  # [..., out] float32
        if bias is not None:
            y.add_(bias)
        return y.to(x.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """With the codes, as the packed layout cannot be copied."""
        state = self.__dict__.copy()
        del state["_packed"]
        state["_sent"] = ByValue(self.codes().values)
        if not self.keeps_original:
            weight: Any = self._parameters["weight"]
            state["_parameters"] = {**self._parameters, "weight": like(weight, torch.empty(0))}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        codes = Codes(state["_sent"], state["_scale"])
        super().__setstate__({**{name: each for name, each in state.items() if name != "_sent"}, "_given": codes})

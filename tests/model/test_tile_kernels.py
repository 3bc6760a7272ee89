"""Products of tiles, instruction by instruction."""

import numba
import pytest
import torch

from lade.backends.cpu.kernels import tiles
from lade.backends.cpu.kernels.instructions import field
from lade.backends.cpu.worker_threads import run_on_team
from lade.compilation import TeamKernel

pytestmark = pytest.mark.skipif(not tiles.has_tiles(), reason="this processor has no tiles (AMX)")


@numba.njit
def _multiply(address, whole):
    tiles.shape_tiles(field(address, 2))
    tiles.zero_tile(0)
    tiles.load_tile(4, field(address, 3), 64)
    tiles.load_tile(5, field(address, 4), 64)
    if whole:
        tiles.multiply_int8(0, 4, 5)
    else:
        tiles.multiply_bfloat16(0, 4, 5)
    tiles.store_tile(0, field(address, 5), 64)
    tiles.release_tiles()


multiply_int8 = TeamKernel(lambda address: _multiply(address, True))
multiply_bfloat16 = TeamKernel(lambda address: _multiply(address, False))


@pytest.mark.parametrize("rows", [1, 7, 16])
@pytest.mark.parametrize("whole", [True, False])
def test_a_tile_times_a_tile(rows, whole):
    inputs, group = (64, 4) if whole else (32, 2)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-128, 128, (each, inputs), generator=generator) for each in (rows, 16))
    dtype, found = (torch.int8, torch.int32) if whole else (torch.bfloat16, torch.float32)
    left, out = x.to(dtype), torch.full((17, 16), -1).to(found)
    right = weight.to(dtype).view(16, inputs // group, group).transpose(0, 1).contiguous()
    fields = (rows, left.data_ptr(), right.data_ptr(), out.data_ptr())
    run_on_team(multiply_int8 if whole else multiply_bfloat16, fields, 1)
    assert torch.equal(out[:rows].long(), x @ weight.t())
    assert (out[rows:] == -1).all(), "rows that a tile does not have are not written"

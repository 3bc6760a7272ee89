"""Compiled kernels of packed layers and invariant models, and the tensors they take; see `lade/native/cpu.h`.

They run on several threads, those of torch's intra-op pool. Torch's OpenMP threads spin for a while before they sleep,
so work that enters their pool finds them awake between two operators of torch, where waking a thread would take longer
than many products. OpenMP's pool does not survive a fork: in a child of the process that imported this, and where torch
has another pool, kernels run in the calling thread.
"""

from __future__ import annotations

import ctypes
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from time import monotonic_ns
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from lade.errors import UnsupportedModelError
from lade.native import COMPILER_REMEDY, library

WIDEST = 32  # least numbers that a norm or an activation takes at once, whatever the width of vectors
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes that kernels take, and how they are told of them."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class CpuKernel:
    """A compiled kernel, found on its first call; several threads may enter it at once, without holding the GIL."""

    def __init__(self, name: str, instructions: str = "") -> None:
        self.name, self.instructions = name, instructions

    @property
    def available(self) -> bool:
        """True if the library is there, and has this kernel for instructions of this processor."""
        return self._found is not None

    @cached_property
    def address(self) -> int:
        """Address of the machine code, a C function; raises `UnsupportedModelError` if there is no such kernel here."""
        if self._found is None:
            raise UnsupportedModelError(f"the compiled kernel {self.name!r} is missing", COMPILER_REMEDY)
        return self._found

    def __call__(self, place: int) -> None:
        """Run the kernel in this thread on the fields at an address, see `run_on_team`."""
        self._enter(place)

    @cached_property
    def _enter(self) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    @cached_property
    def _found(self) -> int | None:
        loaded = library()
        if loaded is None:
            return None
        find = loaded.lade_cpu_kernel
        find.argtypes, find.restype = (ctypes.c_char_p, ctypes.c_char_p), ctypes.c_void_p
        address: int | None = find(self.name.encode(), self.instructions.encode())
        return address


@cache
def kernel(name: str, instructions: str = "") -> CpuKernel:
    """Return a kernel of `lade/native`, for the best instructions that this processor has or for others, as "avx2"."""
    return CpuKernel(name, instructions)


def dtype_code(dtype: torch.dtype) -> int:
    """Return the dtype code that kernels take; raises `ValueError` if none takes this dtype."""
    kind = DTYPE_CODES.get(dtype)
    if kind is None:
        raise ValueError(f"a kernel was given {dtype}; it takes {', '.join(map(str, DTYPE_CODES))}")
    return kind


def address_of(tensor: torch.Tensor | None) -> int:
    """Return the address of a tensor's numbers; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a kernel can read a tensor by its address: a plain tensor or parameter on the CPU."""
    return type(tensor) in _PLAIN and tensor.is_cpu


def refuse(taker: str, takes: str, **given: torch.Tensor | None) -> NoReturn:
    """Raise `ValueError` for tensors that a kernel does not take. It sees addresses only, so callers check first."""
    described = (f"{name} {_described(tensor)}" for name, tensor in given.items() if tensor is not None)
    raise ValueError(f"{taker} was given {', '.join(described)}; it takes {takes}")


def _described(tensor: torch.Tensor) -> str:
    kind = "" if type(tensor) in _PLAIN else f"{type(tensor).__name__} "
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{kind}{dtype} {list(tensor.shape)} on {tensor.device}{' with gradients' * tensor.requires_grad}"


_BEGINNING = 15  # fields of stages before those of the first kernel that is added
_MANY = 2**12  # least numbers per thread, of work that is no product
CALLED = 4
"""How many times as much work per thread pays where a team has to be called for it, which takes some microseconds."""


def run_on_team(kernel: CpuKernel, fields: Sequence[int], parts: int) -> None:
    """Run a kernel on a team of threads, which take the parts of the work one by one.

    The kernel loops until all are taken. It gets the address of int64 fields: the index of the next part (an atomic
    counter), the number of parts, at least one, and then `fields`; the caller keeps alive what these point to. No more
    threads are used than parts, or than torch has.
    """
    stage = 0, kernel.address, 2 + len(fields), 0, 0, parts, *fields
    TEAM.run(array("q", (0, 0, 1, 0, 0, *stage)), min(torch.get_num_threads(), parts))


class At(NamedTuple):
    """A place in memory that differs between calls: so many bytes after one of the addresses that a call is given."""

    address: int
    offset: int = 0


class Stages:
    """Kernels that one team of threads runs one after the other: the work of several calls in one.

    Threads wait for each other between two kernels, which takes as long as small kernels do. They need not where one
    thread does both, as they have one part each, nor where a kernel needs nothing of the one before it.

    The first address that a call is given is that of memory of its own, for what is in between.
    """

    def __init__(self) -> None:
        self.size = 0  # bytes of that memory
        self._places, self._threads = array("q"), 1
        fill = kernel("fill_addresses").address  # the first stage
        self._fields = array("q", (0, 0, 1, 0, 0, 0, fill, 6, 0, 0, 1, 0, 0, 0, 0))
        self._sequence = 0  # index of the last stage's number of fields, if that is a sequence; else 0

    def take(self, size: int) -> At:
        """Return the place of so many bytes in the call's own memory, aligned to 64."""
        place = At(0, self.size)
        self.size += -(-size // 64) * 64
        return place

    def add(self, kernel: CpuKernel, parts: int | At, fields: Sequence[int | At], *, joined: bool = False) -> None:
        """Add a kernel, see `run_on_team`; it is `joined` to the one before if it needs nothing of it.

        What is `At` becomes an address, or another number, in each call.
        """
        joined = joined and not self._sequence  # to a sequence it would be joined as a whole
        if parts == 1 and not joined:
            self._add_to_sequence((kernel.address, 2 + len(fields), 0, 1, *fields))
            return
        self._sequence = 0
        self._extend((0, kernel.address, 2 + len(fields), int(joined), 0, parts, *fields))
        self._fields[2] += 1
        most = torch.get_num_threads()
        self._threads = max(self._threads, most if isinstance(parts, At) else min(most, parts))

    def extend(self, other: Stages, later: int, since: int, offsets: Mapping[int, int]) -> None:
        """Add the kernels of other stages, for another of several alike things that are worked on one after the other.

        Indices of addresses are higher by `later` here, from `since` on; `offsets` are bytes that are added to some of
        the addresses before, by their index.
        """
        places = np.frombuffer(other._places, dtype=np.int64).reshape(-1, 3).copy()
        places[:, 0] += len(self._fields) - _BEGINNING
        for index, more in offsets.items():
            places[places[:, 1] == index, 2] += more
        places[places[:, 1] >= since, 1] += later
        self._places.frombytes(places.tobytes())
        self._fields.extend(other._fields[_BEGINNING:])
        self._fields[2] += other._fields[2] - 1
        self._threads, self._sequence = max(self._threads, other._threads), 0
        self.size = max(self.size, other.size)  # they use the same memory in turn

    def _add_to_sequence(self, member: Sequence[int | At]) -> None:
        """Add a kernel of one part, its address and number of fields first, to the last sequence or to a new one."""
        if not self._sequence:
            self._sequence = len(self._fields) + 2
            self._fields.extend((0, kernel("run_sequence").address, 3, 0, 0, 1, 0))
            self._fields[2] += 1
        self._fields[self._sequence] += len(member)
        self._fields[self._sequence + 4] += 1
        self._extend(member)

    def _extend(self, fields: Sequence[int | At]) -> None:
        for place, field in enumerate(fields, start=len(self._fields)):
            if isinstance(field, At):
                self._places.extend((place, *field))
        self._fields.extend(0 if isinstance(field, At) else field for field in fields)

    @property
    def described(self) -> tuple[Any, ...]:
        """Kernels, fields and places of addresses: equal for stages that do the same."""
        return tuple(self._fields), tuple(self._places)

    def run(self, addresses: Sequence[int]) -> None:
        """Run the kernels with these addresses, 0 for none; the caller keeps alive what they point to."""
        fields, given = self._fields[:], array("q", addresses)
        (own, _), (places, count) = fields.buffer_info(), self._places.buffer_info()
        fields[11:15] = array("q", (own, places, given.buffer_info()[0], count // 3))
        TEAM.run(fields, self._threads)


class ThreadTeam:
    """Threads of torch's pool, as long as none of them keeps the others waiting.

    On a processor that others keep busy, one thread may wait a time slice for its turn, in each of hundreds of kernels.
    A *stall* is the time that threads wait for one that does not run; they stop then, and the calling thread works
    alone for `ALONE` times as long. If the team stalls again before it has worked for that long, it is twice as long as
    the last time: so stalls on a busy processor cost a fraction of what is computed between them, and a team comes
    together again within `LONGEST_NS`. Where stalls are rare, each costs its own time alone, however long a call takes.
    The bits are the same, since the parts of the work are.
    """

    STALL_NS = 300_000
    """Least wait that is a stall: threads that run wait microseconds for each other, others a time slice of 1 ms."""
    ALONE = 8
    LONGEST_NS = 1_000_000_000

    def __init__(self) -> None:
        self._alone_until = self._alone_ns = 0

    def run(self, work: array[int], threads: int) -> None:
        """Run stages, see `run_stages` in `lade/native`, on so many threads."""
        (place, _), entrance = work.buffer_info(), _entrance() if threads > 1 else None
        alone, together = kernel("run_stages"), kernel("run_team")
        while not work[1]:  # something is left to do
            work[0] = work[3] = work[4] = 0
            if entrance is None:
                alone(place)
            elif monotonic_ns() < self._alone_until:
                work[3] = self._alone_until
                alone(place)
            else:
                call = array("q", (entrance, place, threads, 0))
                together(call.buffer_info()[0])
                self._learn(work[0] // (threads - 1) + call[3] - work[4])

    def _learn(self, stalled_ns: int) -> None:
        """Decide for how long to work alone, after a call that stalled for so long."""
        if stalled_ns < self.STALL_NS:
            return
        now, long_ns = monotonic_ns(), self.ALONE * stalled_ns
        again = now - self._alone_until < long_ns
        self._alone_ns = min(2 * self._alone_ns if again else long_ns, self.LONGEST_NS)
        self._alone_until = now + self._alone_ns


TEAM = ThreadTeam()  # there is one pool of threads in a process


def parts_of(numbers: int) -> int:
    """Return the parts of a stage that works on so many numbers: a norm, an activation, a sum."""
    return max(1, min(torch.get_num_threads(), numbers // _MANY))


def float_bits(number: float) -> int:
    """Return the bits of a float32 number as an integer field."""
    return int.from_bytes(struct.pack("<f", number), "little")


_OWNER = os.getpid()


def _entrance() -> int | None:
    """Return the entrance of torch's pool of threads, see `_openmp_entrance`; None in a forked child."""
    return _openmp_entrance() if os.getpid() == _OWNER else None


@cache
def _openmp_entrance() -> int | None:
    """Return the address of OpenMP's `GOMP_parallel(function, data, threads, flags)` in the runtime that torch uses.

    Global symbols are searched before those of torch's own library, as the dynamic linker does. None without one.
    """
    for name in (None, torch._C.__file__):
        enter = getattr(ctypes.CDLL(name), "GOMP_parallel", None)
        if enter is not None:
            return ctypes.cast(enter, ctypes.c_void_p).value
    return None

"""Two accelerators that are none, for models that are split over several devices.

A tensor on one of them wraps a tensor on the CPU, which does the work, so that results can be compared. Every
operation is looked at: as on real machines it fails where it is given tensors of two devices. A number without
dimensions may come from the CPU, and so may indices.

Importing this gives torch's spare backend a name, which cannot be undone: do it in a process of its own. A mode of
torch is its thread's alone: threads that are started meanwhile know nothing of these devices.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME, COUNT = "fake", 2
aten = torch.ops.aten
MOVES = (aten._to_copy.default, aten.to.device, aten.to.dtype_layout)
INDEXED = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
)


class _Backend(backend_registration._DummyBackendModule):
    """What torch asks of a backend's module."""

    default_generators = (torch.default_generator,) * COUNT

    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def set_device(self, device: Any) -> None:
        """All are there at once."""

    def synchronize(self, device: Any = None) -> None:
        """Nothing is ever queued."""

    def empty_cache(self) -> None:
        """There is none."""

    free = (2**40, 2**40)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.free[torch.device(device).index or 0], 2**40

    def memory_reserved(self, device: Any = None) -> int:
        return 0

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    def get_rng_state(self, device: Any = 0) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = 0) -> None:
        torch.set_rng_state(state)


backend_registration._setup_privateuseone_for_python_backend(NAME, _Backend())


class OnDevice(torch.Tensor):
    """A tensor on one of the devices; `inner` is on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
            requires_grad=inner.requires_grad,
        )
        made.inner = inner.detach()
        return made

    def tolist(self) -> Any:
        return self.inner.tolist()

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, **others: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def __getitem__(self, index: Any) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)  # lists would become tensors where no mode is asked
        return super().__getitem__(tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts))

    def __repr__(self) -> str:
        return f"OnDevice({self.device}, {self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


OnDevice.__module__ = "torch.distributed.fake"  # its values are just values, as those of a tensor in shards


class Devices(TorchDispatchMode):
    """While it lasts tensors can be made on, and moved to, `fake:0` and `fake:1`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(each, OnDevice) for each in tree_leaves((args, kwargs))) or _target(kwargs) is not None:
            return computed(func, args, kwargs)
        return func(*args, **kwargs)

    def __enter__(self) -> Self:
        self._tensor = torch.tensor

        def tensor(data: Any, *, device: Any = None, **others: Any) -> torch.Tensor:
            made = self._tensor(data, **others)  # which asks no mode
            return made if device is None else made.to(device)

        torch.tensor = tensor  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        torch.tensor = self._tensor
        super().__exit__(*problem)


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation returns, where it returns it."""
    if func is aten.copy_.default:
        _inner(args[0]).copy_(_inner(args[1]))
        return args[0]
    if func in MOVES:
        return _moved(func, args, kwargs)
    device = _target(kwargs) or _common_device(func, args, kwargs)
    owners = {id(each.inner): each for each in tree_leaves((args, kwargs)) if isinstance(each, OnDevice)}
    on_cpu = {
        **kwargs,
        **({"device": "cpu"} if "device" in kwargs else {}),
        **({"pin_memory": False} if "pin_memory" in kwargs else {}),
    }
    output = func(*tree_map(_inner, args), **tree_map(_inner, on_cpu))
    if device is None:
        return output

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return owners[id(value)] if id(value) in owners else OnDevice(value, device)  # done in place

    return tree_map(wrapped, output)


def _moved(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    source, *others = args
    wanted = kwargs.get("device")
    device = source.device if wanted is None else _numbered(wanted)
    rest = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
    made = func(_inner(source), *others, **rest)
    made = made.clone() if made is _inner(source) else made
    return OnDevice(made, device) if device.type == NAME else made


def _common_device(func: Any, args: Any, kwargs: Any) -> torch.device | None:
    """That of all tensors; raises as torch does if there are two."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    if func in INDEXED and isinstance(args[0], OnDevice):
        tensors = [each for each in tensors if each.device.type == NAME]
    devices = {each.device for each in tensors if each.dim() or each.device.type == NAME}
    if not any(device.type == NAME for device in devices):
        return None
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got some on {names}")
    return devices.pop()


def _target(kwargs: dict[str, Any]) -> torch.device | None:
    """The fake device that something is to be made on, if it is one."""
    device = None if kwargs.get("device") is None else _numbered(kwargs["device"])
    return device if device is not None and device.type == NAME else None


def _numbered(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device(NAME, device.index or 0) if device.type == NAME else device


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnDevice) else value

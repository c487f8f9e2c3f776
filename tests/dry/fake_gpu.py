"""A GPU that computes nothing: CUDA tensors on a machine without a driver, with all operations on them counted.

Tensors on the host are real, so that bookkeeping works; tensors on the device have a shape and no data (FakeTensorMode). The
GPU notes each operation, with its place, that would make the host wait for the device, or the device for pageable host memory.
"""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from parallel_backend.comm import communicator
from parallel_backend.models.sequence_parallel.stream import Stream
from parallel_backend.vae.row_tensor import RowTensor

aten = torch.ops.aten
prim_device = torch.ops.prim.device.default

DEVICE = torch.device("cuda", 0)

CAPABILITY = (9, 0)
"""The compute capability of an H100."""

NO_KERNEL = (
    aten._reshape_alias.default,
    aten._unsafe_view.default,
    aten.detach.default,
    aten.alias.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.lift_fresh.default,
    aten.is_pinned.default,
    aten.set_.source_Storage,
)
"""Operators that launch no kernel on the device, besides views."""

COMPUTING = ("mm", "addmm", "bmm", "baddbmm", "convolution")
"""Names of operators whose time is that of their computing rather than of reading and writing, besides attention's."""

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero", "bincount")
"""Names of operators for which the host waits."""

ROOT = Path(__file__).parents[2]


@dataclass
class Counts:
    """Counts of operations on the device.

    `order` has kernels and collectives by name, in their order. `peak` is the largest number of bytes of tensors alive at once,
    without weights. `moved` is the number of bytes that kernels read and write, without those of COMPUTING.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    order: list[str] = field(default_factory=list)
    peak: int = 0
    moved: int = 0


class FakeGpu(TorchDispatchMode):
    """A mode that counts every operation on CUDA while `running` is entered.

    Attributes:
        counts: the counts since `begin`.
        waits: places where the host would have waited since `watch` was set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.waits: list[str] = []
        self.watch = False
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._alive = 0
        self._floor = 0
        self._seen: set[int] = set()
        self._pinned: set[int] = set()
        self._registered: set[int] = set()

    @contextmanager
    def running(self, rank: int, ranks: int) -> Iterator[FakeGpu]:
        """Run as one rank of a world whose other ranks are fake."""
        with fake_ranks(rank, ranks), ExitStack() as stack:
            for patch in _stand_ins(self):
                stack.enter_context(patch)
            stack.enter_context(torch.no_grad())
            stack.enter_context(_OneKernelAttention(self))
            stack.enter_context(self._fake)
            stack.enter_context(self)
            yield self

    def begin(self) -> Counts:
        """Start new counts and return the previous ones. Tensors that are alive now (weights) are not part of the peak."""
        before, self.counts = self.counts, Counts(peak=self._alive - self._floor)
        return before

    def keep(self) -> None:
        """Leave the tensors that are alive now, the weights, out of peaks."""
        self._floor = self._alive

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """Note that host memory at this address is pinned, and return 0, CUDA's success."""
        self._registered.add(address)
        return 0

    def note_wait(self, what: str) -> None:
        """Note that the host waits for the device here."""
        if self.watch:
            self.waits.append(f"{what} at {_place()}")

    def waited(self) -> list[str]:
        """Return the places where the host would have waited, each with its number of times."""
        return [f"{count} x {place}" for place, count in Counter(self.waits).items()]

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator with real data on the host, and with fake tensors on the device."""
        if func is prim_device:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs = dict(kwargs or {})
        if (out := self._taken_apart(func, types, args, kwargs)) is not NotImplemented:
            return out
        if any(issubclass(kind, Stream | RowTensor) for kind in types):
            return NotImplemented  # the tensor's class passes its local tokens or rows back to this mode
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        there = device is not None and torch.device(device).type == "cuda"
        if not there and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._on_host(func, args, kwargs)
        if there or any(tensor.device.type == "cuda" for tensor in tensors):
            self._count(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0  # a value in place of the one that would be read
        if self._copies_to_host(func, args, kwargs):
            return self._to_host(func, args, kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in tensors if isinstance(tensor, FakeTensor)}
        args, kwargs = tree_map_only(Tensor, self._faked, (args, kwargs))
        out = func(*args, **kwargs)
        born = [leaf for leaf in tree_leaves(out) if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda"]
        for tensor in born:
            self._born(tensor, given)
        if _is_kernel(func, kwargs) and born:
            self._count_moved(func, [*tensors, *born])
        return out

    def _taken_apart(self, func: Any, types: Sequence[type], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Decompose composite operators in inference mode, where they arrive undecomposed."""
        if not torch.is_inference_mode_enabled() or any(issubclass(kind, RowTensor) for kind in types):
            return NotImplemented  # a RowTensor handles some composite operators itself
        with self:
            return func.decompose(*args, **kwargs)

    def _faked(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        with unset_fake_temporarily():
            if func in (aten._pin_memory.default, aten.pin_memory.default):
                out, pinned = args[0].clone(), True
            else:
                out = func(*args, **kwargs)
            if func is aten.empty.memory_format:
                out.zero_()  # stands for values that another rank would have sent
        if pinned:
            key = out.untyped_storage()._cdata
            self._pinned.add(key)
            weakref.finalize(out.untyped_storage(), self._pinned.discard, key)
        return out

    def _copies_to_host(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        if func is aten._to_copy.default:
            device = kwargs.get("device")
            return device is not None and torch.device(device).type == "cpu"
        return func is aten.copy_.default and not isinstance(args[0], FakeTensor)

    def _to_host(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
        """Return zeros in place of the values that would be read."""
        with unset_fake_temporarily():
            if func is aten.copy_.default:
                return args[0].zero_()  # type: ignore[no-any-return]
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)

    def _count(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d":
            self.counts.collectives[name] += 1
            self.counts.order.append(name)
            return
        if name in WAITS or (name in ("index", "index_put_", "index_put") and _by_mask_or_host(args)):
            self.note_wait(name)
        if name in ("_to_copy", "copy_"):
            self._look_at_copy(name, args, kwargs)
        if _is_kernel(func, kwargs):
            self.counts.kernels[name] += 1
            self.counts.order.append(name)

    def _count_moved(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """Count the bytes of a kernel's operands and results. An expanded operand is read once."""
        name = func._schema.name.split("::")[1]
        if name in COMPUTING or "attention" in name:
            return
        there = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        if name in ("copy_", "fill_", "zero_"):
            there = there[1:]  # these do not read what they overwrite
        self.counts.moved += sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in there)

    def _look_at_copy(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        if name == "copy_":
            into, source = args[0].device.type, args[1]
            later = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
            host = args[0] if into == "cpu" else source
        else:
            source, later = args[0], bool(kwargs.get("non_blocking"))
            device = kwargs.get("device")
            into = source.device.type if device is None else torch.device(device).type
            host = source
        if into in (source.device.type, "meta"):
            return
        pinned = host.device.type == "cpu" and self._is_pinned(host.untyped_storage())
        if not (later and pinned) and not (name == "copy_" and into == "cuda" and source.ndim == 0):
            self.note_wait(f"a copy from {source.device.type} to {into}")

    def _is_pinned(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._pinned or storage.data_ptr() in self._registered

    def _born(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in given or key in self._seen:
            return
        self._seen.add(key)
        self._alive += nbytes
        self.counts.peak = max(self.counts.peak, self._alive - self._floor)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self._alive -= nbytes


class _OneKernelAttention(TorchFunctionMode):
    """A mode that counts torch's attention as one kernel, as on a GPU. Without a driver torch would decompose it."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run flash attention, or, with a mask, memory-efficient attention."""
        kwargs = kwargs or {}
        given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
        if func is torch.nn.functional.scaled_dot_product_attention and given["query"].device.type == "cuda":
            q, k, v, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
            if mask is None:
                return aten._scaled_dot_product_flash_attention(q, k, v)[0]
            return aten._scaled_dot_product_efficient_attention(q, k, v, mask, False)[0]
        return func(*args, **kwargs)


def _is_kernel(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return True if an operator launches a kernel on the device."""
    return not func.is_view and func not in NO_KERNEL and kwargs.get("device") != torch.device("meta")


def _by_mask_or_host(args: Any) -> bool:
    """Return True if an index is a mask, whose size the host reads, or lies on the host and is copied."""
    indices = [index for index in args[1] if isinstance(index, Tensor)]
    return any(index.dtype in (torch.bool, torch.uint8) or index.device.type == "cpu" for index in indices)


def _place() -> str:
    """Return the innermost frames in this pack or in ComfyUI's models, innermost first."""
    frames = [
        f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
        for frame in traceback.extract_stack()
        if f"{ROOT}/parallel_backend" in frame.filename or "/comfy/" in frame.filename
    ]
    return " < ".join(reversed(frames[-4:]))


class FakeStream(nullcontext[None]):
    """A stream or an event on which everything is done at once: each of its methods returns it, and it is true."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __getattr__(self, name: str) -> Callable[..., FakeStream]:
        return lambda *_: self


def _tensors_equal(_: Tensor, __: Tensor) -> bool:
    """Return True, as nothing arrives. A Mock would keep its arguments alive."""
    return True


@contextmanager
def fake_ranks(rank: int, ranks: int) -> Iterator[None]:
    """Make this process one rank of a world whose exchanges return at once, with arbitrary values."""
    groups: Callable[..., Any] = dist.new_subgroups_by_enumeration

    def fake_groups(listed: Any, timeout: Any = None, backend: str | None = None, **others: Any) -> Any:
        return groups(listed, timeout, "fake", **others)

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        with (
            mock.patch.object(dist, "new_subgroups_by_enumeration", fake_groups),
            mock.patch.object(communicator, "tensors_equal", _tensors_equal),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _stand_ins(gpu: FakeGpu) -> Sequence[Any]:
    """Return patches that replace calls of the driver."""
    cuda: Mapping[str, Callable[..., Any]] = {
        "get_device_capability": lambda _=None: CAPABILITY,
        "synchronize": lambda _=None: gpu.note_wait("torch.cuda.synchronize"),
        "current_stream": FakeStream,
        "Stream": FakeStream,
        "Event": FakeStream,
        "stream": lambda _: FakeStream(),
        "empty_cache": lambda: gpu.note_wait("torch.cuda.empty_cache"),
        "set_device": lambda _: None,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=gpu.register, cudaHostUnregister=lambda _: 0),
    }
    return [
        *(mock.patch.object(torch.cuda, name, replacement) for name, replacement in cuda.items()),
        mock.patch.object(Tensor, "record_stream", return_value=None),
    ]

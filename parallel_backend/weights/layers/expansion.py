"""Weights that are stored in blocks: expanded by one kernel, and kept for the time of a request where there is room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..formats import Storage
from .cast import PackedLinear

Kernel = Callable[[Tensor, Tensor], Tensor]

ONE_KERNEL: dict[str, Any] = {
    "realize_opcount_threshold": 1 << 10,
    "realize_reads_threshold": 1 << 10,
    "compile_threads": 1,
}
"""For torch's compiler: nothing in between goes to memory, and no processes are started to make one kernel."""

FIRST_VALUES = 1 << 20
"""Values that a kernel is made and tried with: it is chosen for sizes like that of a weight."""


class Expansion:
    """How a rank expands weights that are stored in blocks.

    Args:
        fused: whether by kernels of torch's compiler, which `make_kernels` makes. They give the same bits.
    """

    def __init__(self, fused: bool) -> None:
        self._fused = fused
        self._kernels: dict[tuple[str, torch.dtype], Kernel] = {}
        self._warnings: list[str] = []
        self._cached: dict[tuple[nn.Module, torch.dtype], Tensor] = {}
        self._spare = 0

    def warnings(self) -> tuple[str, ...]:
        """Why kernels could not be made, if that has turned out since this was asked for last."""
        warnings, self._warnings = tuple(self._warnings), []
        return warnings

    def make_kernels(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Make what a module that computes in `dtype` lacks of them; if one fails, weights are expanded by eager operations.

        Not while it runs: a GPU may have to be done with what it was given before it takes a new kernel, and in PipeFusion
        what it was given may be a send that another stage takes only once it has its kernel.
        """
        for layer in module.modules():
            if not isinstance(layer, ExpandedLinear):
                continue
            key = layer.storage.name, layer.expands_to(dtype)
            if self._fused and key not in self._kernels:
                try:
                    self._kernels[key] = _compiled_kernel(layer.storage, layer.expands_to(dtype), device)
                except Exception as error:
                    self._fused = False  # the compiler's, or what it needs (triton, a C compiler): eager operations do
                    first, _, _ = (str(error).strip() or type(error).__name__).partition("\n")
                    self._warnings.append(
                        f"GGUF weights are expanded without a compiler, which takes longer: {first.rstrip('.')}."
                    )

    @contextmanager
    def keeping(self, spare: int) -> Iterator[None]:
        """While inside, weights that have been expanded stay so, as many as fit into so many bytes.

        Those that come first: blocks run in the same order again and again, so that any are as good. Nothing may change
        weights inside.
        """
        self._spare = spare
        try:
            yield
        finally:
            self._spare = 0
            self._cached.clear()

    def cached_values(self, layer: nn.Module, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        """Return a layer's values, from the cache if they are there. Callers must not write to them."""
        values = self._cached.get((layer, dtype))
        if values is None:
            values = make()
            if values.nbytes <= self._spare:
                self._spare -= values.nbytes
                self._cached[layer, dtype] = values
        return values

    def expand(self, storage: Storage, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of stored rows, by the kernel where there is one."""
        kernel = self._kernels.get((storage.name, dtype))
        return storage.expand(rows, dtype) if kernel is None else _run(kernel, storage, rows)


class ExpandedLinear(PackedLinear):
    """A linear layer whose weight is stored in blocks, which an Expansion expands and may keep."""

    expansion: Expansion
    runs_as_operator = True

    def expands_to(self, dtype: torch.dtype) -> torch.dtype:
        """The type that blocks are expanded to where `dtype` is asked for: adapters change values in fp32."""
        return dtype if self.change is None else torch.float32

    def full_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight's values, which may be kept: not to be written to."""
        return self.expansion.cached_values(self, dtype, lambda: super(ExpandedLinear, self).full_weight(dtype))

    def expand(self, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The values of a weight that is packed as this layer's."""
        assert scale is None, "blocks have their scales in them"
        return self.expansion.expand(self.storage, weight, dtype)


def expand_by(module: nn.Module, expansion: Expansion) -> None:
    """Have every layer below a module whose weight is stored in blocks expand it in this way."""
    for child in module.modules():
        if isinstance(child, PackedLinear) and child.storage.unpack is not None:
            child.__class__ = ExpandedLinear
            assert isinstance(child, ExpandedLinear)
            child.expansion = expansion


def _compiled_kernel(storage: Storage, dtype: torch.dtype, device: torch.device) -> Kernel:
    """The kernel from blocks of this type to values of this type, for any number of blocks. It has run once."""
    unpack = storage.unpack
    assert unpack is not None

    def unpacked(blocks: Tensor, halves: Tensor) -> Tensor:
        return unpack(blocks, halves).to(dtype)

    # What is compiled is kept with the code, and torch has a limit for it: each kernel has a copy.
    own = FunctionType(unpacked.__code__.replace(), unpacked.__globals__, closure=unpacked.__closure__)
    kernel: Kernel = torch.compile(own, fullgraph=True, options=ONE_KERNEL)
    _run(kernel, storage, torch.zeros(FIRST_VALUES // storage.values, storage.nbytes, dtype=torch.uint8, device=device))
    return kernel


def _run(kernel: Kernel, storage: Storage, rows: Tensor) -> Tensor:
    from torch._dynamo import maybe_mark_dynamic  # takes a while to import, and has been by whoever has a kernel

    blocks = rows.view(-1, storage.nbytes)
    halves = blocks.view(torch.float16)
    for tensor in (blocks, halves):
        maybe_mark_dynamic(tensor, 0)
    return kernel(blocks, halves).view(rows.shape[0], -1)

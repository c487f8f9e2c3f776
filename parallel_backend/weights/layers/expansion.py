"""Weights stored in blocks: one kernel expands them, and they stay expanded during a request if there is memory."""

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
"""Options of torch's compiler: no intermediate goes to memory, and no processes are started to make one kernel."""

FIRST_VALUES = 1 << 20
"""Number of values with which a kernel is made and tried. The kernel is chosen for sizes like that of a weight."""


class Expansion:
    """The way in which a rank expands weights that are stored in blocks.

    Args:
        fused: True to expand by kernels of torch's compiler, which `make_kernels` makes. They give the same bits.
    """

    def __init__(self, fused: bool) -> None:
        self._fused = fused
        self._kernels: dict[tuple[str, torch.dtype], Kernel] = {}
        self._warnings: list[str] = []
        self._cached: dict[tuple[nn.Module, torch.dtype], Tensor] = {}
        self._spare = 0

    def warnings(self) -> tuple[str, ...]:
        """Return the reasons why kernels could not be made, as far as they are new since the last call."""
        warnings, self._warnings = tuple(self._warnings), []
        return warnings

    def make_kernels(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Make the kernels that a module that computes in `dtype` lacks. If one fails, eager operations expand weights.

        Do not call this while the module runs. A GPU may have to finish its work before it takes a new kernel. In PipeFusion
        that work may be a send, which another stage takes only once it has its own kernel.
        """
        for layer in module.modules():
            if not isinstance(layer, ExpandedLinear):
                continue
            key = layer.storage.name, layer.expands_to(dtype)
            if self._fused and key not in self._kernels:
                try:
                    self._kernels[key] = _compiled_kernel(layer.storage, layer.expands_to(dtype), device)
                except Exception as error:
                    self._fused = False  # the compiler or its tools (triton, a C compiler) failed: use eager code
                    first, _, _ = (str(error).strip() or type(error).__name__).partition("\n")
                    self._warnings.append(
                        f"GGUF weights are expanded without a compiler, which takes longer: {first.rstrip('.')}."
                    )

    @contextmanager
    def keeping(self, spare: int) -> Iterator[None]:
        """Keep expanded weights inside the context, as many as fit into `spare` bytes.

        The weights that come first are kept. Blocks run in the same order again and again, so any weights are as good. Nothing
        may change weights inside the context.
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
        """Return the values of stored rows, expanded by the kernel if there is one."""
        kernel = self._kernels.get((storage.name, dtype))
        return storage.expand(rows, dtype) if kernel is None else _run(kernel, storage, rows)


class ExpandedLinear(PackedLinear):
    """A linear layer whose weight is stored in blocks. An Expansion expands the weight and may keep the values."""

    expansion: Expansion
    runs_as_operator = True

    def expands_to(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to which blocks are expanded where `dtype` is needed. Adapters change values in fp32."""
        return dtype if self.change is None else torch.float32

    def full_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight's values. They may be kept, so callers must not write to them."""
        return self.expansion.cached_values(self, dtype, lambda: super(ExpandedLinear, self).full_weight(dtype))

    def expand(self, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the values of a weight that is packed like this layer's weight."""
        assert scale is None, "blocks have their scales in them"
        return self.expansion.expand(self.storage, weight, dtype)


def expand_by(module: nn.Module, expansion: Expansion) -> None:
    """Make every layer below a module whose weight is stored in blocks use `expansion`."""
    for child in module.modules():
        if isinstance(child, PackedLinear) and child.storage.unpack is not None:
            child.__class__ = ExpandedLinear
            assert isinstance(child, ExpandedLinear)
            child.expansion = expansion


def _compiled_kernel(storage: Storage, dtype: torch.dtype, device: torch.device) -> Kernel:
    """Return a kernel from blocks of this type to values of `dtype`, for any number of blocks. It has run once."""
    unpack = storage.unpack
    assert unpack is not None

    def unpacked(blocks: Tensor, halves: Tensor) -> Tensor:
        return unpack(blocks, halves).to(dtype)

    # Torch keeps compiled code with the function's code and limits its amount, so each kernel gets a copy of the code.
    own = FunctionType(unpacked.__code__.replace(), unpacked.__globals__, closure=unpacked.__closure__)
    kernel: Kernel = torch.compile(own, fullgraph=True, options=ONE_KERNEL)
    _run(kernel, storage, torch.zeros(FIRST_VALUES // storage.values, storage.nbytes, dtype=torch.uint8, device=device))
    return kernel


def _run(kernel: Kernel, storage: Storage, rows: Tensor) -> Tensor:
    from torch._dynamo import maybe_mark_dynamic  # slow to import, and imported already where a kernel exists

    blocks = rows.view(-1, storage.nbytes)
    halves = blocks.view(torch.float16)
    for tensor in (blocks, halves):
        maybe_mark_dynamic(tensor, 0)
    return kernel(blocks, halves).view(rows.shape[0], -1)

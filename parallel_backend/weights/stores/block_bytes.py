"""Blocks whose tensors lie in one buffer of bytes for each block. A buffer has memory only while it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .store import ParameterRun

ALIGNMENT = 256
"""Alignment in bytes of tensors and shares in a buffer, which kernels expect of a separate tensor."""


@dataclass(frozen=True)
class Span:
    """The position of a parameter: from byte `start` of a block's buffer on."""

    block: int
    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """Return the byte after the last."""
        return self.start + self.shape.numel() * self.dtype.itemsize

    def values(self, buffer: Tensor) -> Tensor:
        """Return the parameter's values in a buffer of the block."""
        return buffer[self.start : self.stop].view(self.dtype).view(self.shape)

    def overlap(self, share: slice) -> slice:
        """Return the bytes of the buffer that belong to both this parameter and a share."""
        start = min(max(self.start, share.start), self.stop)
        return slice(start, max(start, min(self.stop, share.stop)))

    def run(self, share: slice, data: Tensor) -> ParameterRun:
        """Return the elements of the parameter that are in `data`, a share of the buffer."""
        mine = self.overlap(share)
        values = data[mine.start - share.start : mine.stop - share.start] if mine.start < mine.stop else data[:0]
        return ParameterRun(values.view(self.dtype), (mine.start - self.start) // self.dtype.itemsize)


class BlockBytes:
    """A module whose blocks are one buffer of bytes each, cut evenly over ranks, and its tensors outside of blocks.

    Every parameter of a block, of whatever dtype, is a view of the block's buffer. A buffer has memory, and an address, only
    from `allocate` to `free`. In between, the parameters exist and their memory does not.

    Args:
        module: on the meta device.
        parts: number of ranks that share a buffer. The size of a buffer is a multiple of it.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], parts: int) -> None:
        self._module = module
        self._parts = parts
        self._inside = {id(part) for block in blocks for part in block.modules()}
        self._buffers: list[Tensor] = []
        self.spans: dict[str, Span] = {}
        self.sizes: list[int] = []
        names = {id(part): f"{name}." if name else "" for name, part in module.named_modules()}
        for number, block in enumerate(blocks):
            end = 0
            for part, key, parameter in _own_parameters(block):
                name = names[id(part)] + key
                assert name not in self.spans, f"two blocks share {name}"
                span = self.spans[name] = Span(number, end, parameter.shape, parameter.dtype)
                end = _aligned(span.stop, ALIGNMENT)
            self.sizes.append(_aligned(end, parts * ALIGNMENT))

    @property
    def outside(self) -> int:
        """Return the bytes of parameters that belong to no block, and of all buffers of the module."""
        parameter_bytes = sum(parameter.nbytes for _, _, parameter in self._outer_parameters())
        return parameter_bytes + sum(buffer.nbytes for buffer in self._module.buffers())

    @property
    def whole(self) -> int:
        """Return the bytes of the blocks that are whole now."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)

    def share(self, block: int, part: int) -> slice:
        """Return the bytes of a block's buffer that are a rank's share."""
        size = self.sizes[block] // self._parts
        return slice(part * size, (part + 1) * size)

    def materialise(self, device: torch.device) -> None:
        """Allocate the tensors outside of blocks, and no memory for blocks. Buffers that have values keep them."""
        for part, key, parameter in self._outer_parameters():
            part.register_parameter(key, _frozen(torch.empty(parameter.shape, dtype=parameter.dtype, device=device)))
        for part in self._module.modules():
            for key, buffer in part.named_buffers(recurse=False):
                part._buffers[key] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        self._buffers = []
        for number, size in enumerate(self.sizes):
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            for name, span in self.spans.items():
                if span.block == number:
                    owner, _, key = name.rpartition(".")
                    self._module.get_submodule(owner).register_parameter(key, _frozen(span.values(buffer)))
            self._buffers.append(buffer)
            self.free(number)

    def move_outside(self, device: torch.device) -> None:
        """Move the tensors outside of blocks to another device."""
        for part, key, parameter in self._outer_parameters():
            part.register_parameter(key, _frozen(parameter.to(device)))
        for part in self._module.modules():
            for key, buffer in part.named_buffers(recurse=False):
                part._buffers[key] = buffer.to(device)

    def allocate(self, block: int) -> Tensor:
        """Allocate a block's buffer, whose values are not set, and return it."""
        buffer = self._buffers[block]
        buffer.untyped_storage().resize_(self.sizes[block])
        return buffer

    def free(self, block: int) -> None:
        """Free a buffer's memory."""
        self._buffers[block].untyped_storage().resize_(0)

    def outer(self, name: str) -> Tensor:
        """Return a parameter that belongs to no block."""
        return self._module.get_parameter(name).data

    def _outer_parameters(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        parameters = _own_parameters(self._module)
        return ((part, key, parameter) for part, key, parameter in list(parameters) if id(part) not in self._inside)


def _own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for part in module.modules():
        for key, parameter in part.named_parameters(recurse=False):
            yield part, key, parameter


def _frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _aligned(count: int, to: int) -> int:
    return -(-count // to) * to

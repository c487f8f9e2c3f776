"""Blocks whose tensors lie in one buffer of bytes each, which has memory only while it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .store import ParameterRun

ALIGNMENT = 256
"""Bytes that tensors and shares of a buffer begin at multiples of: what kernels expect of a tensor of its own."""


@dataclass(frozen=True)
class Span:
    """Where a parameter is: from byte `start` of the buffer of a block on."""

    block: int
    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """The byte behind the last."""
        return self.start + self.shape.numel() * self.dtype.itemsize

    def values(self, buffer: Tensor) -> Tensor:
        """The parameter in a buffer of the block."""
        return buffer[self.start : self.stop].view(self.dtype).view(self.shape)

    def overlap(self, share: slice) -> slice:
        """Which bytes of the buffer are this parameter's and the share's."""
        start = min(max(self.start, share.start), self.stop)
        return slice(start, max(start, min(self.stop, share.stop)))

    def run(self, share: slice, data: Tensor) -> ParameterRun:
        """The elements that `data`, a share of the buffer, has of the parameter."""
        mine = self.overlap(share)
        values = data[mine.start - share.start : mine.stop - share.start] if mine.start < mine.stop else data[:0]
        return ParameterRun(values.view(self.dtype), (mine.start - self.start) // self.dtype.itemsize)


class BlockBytes:
    """A module's blocks, each of them in one buffer of bytes that is cut evenly over ranks; and what is outside of them.

    Every parameter of a block, of whatever type, is a view of the block's buffer. A buffer has an address only while the
    block is whole (`allocate` to `free`); in between the parameters are there and their memory is not.

    Args:
        module: on the meta device.
        parts: ranks that share a buffer, whose size is a multiple of it.
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
        """Bytes of parameters that belong to no block, and of all buffers of the module."""
        parameter_bytes = sum(parameter.nbytes for _, _, parameter in self._outer_parameters())
        return parameter_bytes + sum(buffer.nbytes for buffer in self._module.buffers())

    @property
    def whole(self) -> int:
        """Bytes of the blocks that are whole now."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)

    def share(self, block: int, part: int) -> slice:
        """Which bytes of a block's buffer are a rank's."""
        size = self.sizes[block] // self._parts
        return slice(part * size, (part + 1) * size)

    def materialise(self, device: torch.device) -> None:
        """Take memory for what is outside of blocks, and none for the blocks; buffers that have values keep them."""
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
        """Take what is outside of blocks to another device."""
        for part, key, parameter in self._outer_parameters():
            part.register_parameter(key, _frozen(parameter.to(device)))
        for part in self._module.modules():
            for key, buffer in part.named_buffers(recurse=False):
                part._buffers[key] = buffer.to(device)

    def allocate(self, block: int) -> Tensor:
        """A block's buffer, with memory that holds nothing yet."""
        buffer = self._buffers[block]
        buffer.untyped_storage().resize_(self.sizes[block])
        return buffer

    def free(self, block: int) -> None:
        """Give a buffer's memory back."""
        self._buffers[block].untyped_storage().resize_(0)

    def outer(self, name: str) -> Tensor:
        """A parameter that belongs to no block."""
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

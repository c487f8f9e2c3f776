"""A communicator over one mesh axis, with the two primitives that every parallel form is made of.

Only `all_to_all_single` with splits and `batch_isend_irecv` are used: pairs that are not batched work on gloo and
deadlock on NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Communicator:
    """The ranks of one mesh axis.

    Args:
        group: the process group of the axis.
        device: where the tensors live.
        staged: copy through pinned host memory (gloo between GPUs, where peer-to-peer does not work).
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, staged: bool) -> None:
        self.group = group
        self.device = device
        self.staged = staged
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)

    def warm_up(self) -> None:
        """Exchange one element each way between all members, which opens every connection now."""
        if self.size > 1:
            ones = [1] * self.size
            self.all_to_all(torch.ones(self.size, device=self.device), ones, ones)
            _, wait = self.shift(torch.ones(1, device=self.device), 1)
            wait()

    def all_to_all(self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Tensor:
        """Send the k-th piece of a flat tensor to rank k and return the pieces received, in rank order.

        Args:
            send: flat, contiguous, `sum(send_sizes)` elements.
            send_sizes: elements for each rank; may differ and may be zero.
            receive_sizes: elements expected from each rank.
        """
        if self.size == 1:
            return send
        outgoing = self._outgoing(send)
        received = self._buffer(sum(receive_sizes), send.dtype)
        dist.all_to_all_single(received, outgoing, list(receive_sizes), list(send_sizes), group=self.group)
        return self._incoming(received)

    def shift(self, send: Tensor, receive_size: int) -> tuple[Tensor, Callable[[], Tensor]]:
        """Start passing a flat tensor to the next rank of the ring while receiving from the one before.

        Returns the buffer being filled and a function that waits for it and returns it on the device. Either side
        may be empty.
        """
        outgoing = self._outgoing(send)
        received = self._buffer(receive_size, send.dtype)
        following = self._ranks[(self.rank + 1) % self.size]
        preceding = self._ranks[(self.rank - 1) % self.size]
        operations = []
        if outgoing.numel():
            operations.append(dist.P2POp(dist.isend, outgoing, following, self.group))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, preceding, self.group))
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return self._incoming(received)

        return received, wait

    def gather(self, local: Tensor, sizes: Sequence[int]) -> Tensor:
        """Every rank's run of tokens, joined along dim 1, on every rank.

        Args:
            local: `[batch, sizes[rank], channels]`.
            sizes: tokens held by each rank.
        """
        if self.size == 1:
            return local
        batch, _, channels = local.shape
        flat = local.reshape(-1)
        received = self.all_to_all(
            flat.repeat(self.size), [flat.numel()] * self.size, [batch * size * channels for size in sizes]
        )
        pieces = received.split([batch * size * channels for size in sizes])
        return torch.cat([p.view(batch, n, channels) for p, n in zip(pieces, sizes, strict=True)], dim=1)

    def _outgoing(self, tensor: Tensor) -> Tensor:
        if not self.staged:
            return tensor.contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor)

    def _buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        if self.staged:
            return torch.empty(size, dtype=dtype, pin_memory=True)
        return torch.empty(size, dtype=dtype, device=self.device)

    def _incoming(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device) if self.staged else tensor

"""Communicator: the collectives and sends among the ranks of one mesh axis. Every form of parallelism uses these.

`all_to_all_single` with explicit sizes exchanges activations, also round a ring. `batch_isend_irecv` sends them between
pipeline stages, because separate sends and receives work on gloo and deadlock on NCCL. When the host is many blocks ahead of
the GPU, NCCL's sends and receives keep a buffer until the GPU gets there. Its collectives do not.

Methods that start with `start_` return a function that waits for the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..transfers import empty_pinned
from .meter import Meter

GPU_PATTERN, CPU_PATTERN = 1 << 16, 1 << 6
"""Elements of the test data for each pair of ranks. Between GPUs it is large enough to take the same path as activations."""


def tensors_equal(received: Tensor, expected: Tensor) -> bool:
    """Return True if the tensors are equal; waits for the device."""
    return torch.equal(received, expected)


def _patterns(numbers: Sequence[int], elements: int, device: torch.device) -> Tensor:
    """Return test data, flat fp32: for each number a run of `elements` values that differs from all other runs."""
    runs = torch.arange(elements, device=device) % 251
    return torch.cat([runs + 256 * number for number in numbers]).float()


class Communicator:
    """The ranks of one mesh axis.

    Args:
        name: the meter's name for the traffic of this axis.
        group: the process group; None for this rank alone.
        device: the device of all tensors.
        staged: copy tensors through pinned host memory, for gloo between GPUs, where peer-to-peer does not work.
        meter: counts bytes and waits.

    Attributes:
        size: the number of ranks.
        rank: this rank's number among them.
    """

    def __init__(
        self, name: str, group: dist.ProcessGroup | None, device: torch.device, staged: bool, meter: Meter
    ) -> None:
        self.name = name
        self.device = device
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._group = group
        self._staged = staged
        self._meter = meter
        self._ranks = [] if group is None else dist.get_process_group_ranks(group)
        self._pending_sends: list[tuple[dist.Work, Tensor]] = []

    def single_rank(self) -> Communicator:
        """Return a communicator of this rank only, for work that every rank repeats."""
        return Communicator(self.name, None, self.device, False, self._meter)

    @property
    def is_traced(self) -> bool:
        """Return True if the user asked for a trace, which also turns on checks that take time."""
        return self._meter.trace is not None

    def warm_up(self) -> None:
        """Exchange test data with every rank, which opens every connection now. A collective.

        Raises:
            RuntimeError: the received data differs, for example because the driver reports P2P that does not work.
        """
        if self.size == 1:
            return
        elements = GPU_PATTERN if self.device.type == "cuda" else CPU_PATTERN
        patterns = functools.partial(_patterns, elements=elements, device=self.device)
        sent = patterns([self.rank * self.size + target for target in range(self.size)])
        expected = patterns([source * self.size + self.rank for source in range(self.size)])
        received = self.all_to_all(sent, [elements] * self.size, [elements] * self.size)
        shifted = self.start_shift(patterns([self.rank]), elements)()
        expected_shifted = patterns([(self.rank - 1) % self.size])
        if not (tensors_equal(received, expected) and tensors_equal(shifted, expected_shifted)):
            raise RuntimeError(
                f"Data exchanged between ranks {self._ranks} arrived corrupted on rank {self._ranks[self.rank]}."
            )

    def all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], kind: str = ""
    ) -> Tensor:
        """Send the k-th piece of a tensor to rank k. A collective.

        Args:
            send: flat, contiguous, `sum(send_sizes)` elements.
            send_sizes: the number of elements for each rank; may differ and may be zero.
            receive_sizes: the number of elements from each rank.
            kind: the meter's name for this traffic, if not the axis's.

        Returns:
            The received pieces, flat, in rank order.
        """
        if self.size == 1:
            return send
        outgoing = self._outgoing(send)
        received = self._buffer(sum(receive_sizes), send.dtype)
        self._count(sum(send_sizes) - send_sizes[self.rank], send.dtype, kind)
        self._meter.tally.count(self.name, self._ranks)
        with self._meter.wait(self.name):
            dist.all_to_all_single(received, outgoing, list(receive_sizes), list(send_sizes), group=self._group)
        return self._incoming(received)

    def start_all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> Callable[[], Tensor]:
        """Start an `all_to_all`. A collective.

        Returns:
            A function that waits and returns the received pieces.
        """
        outgoing = self._outgoing(send)
        received = self._buffer(sum(receive_sizes), send.dtype)
        self._count(sum(send_sizes) - send_sizes[self.rank], send.dtype)
        sizes = list(receive_sizes), list(send_sizes)
        tally = self._meter.tally
        tally.count(self.name, self._ranks)
        work = dist.all_to_all_single(received, outgoing, *sizes, group=self._group, async_op=True)
        tally.add_pending(work)

        def wait() -> Tensor:
            with self._meter.wait(self.name):
                tally.wait(work)
            return self._incoming(received)

        return wait

    def start_shift(self, send: Tensor, receive_size: int) -> Callable[[], Tensor]:
        """Start to send a flat tensor to the next rank of the ring and to receive one from the previous. A collective.

        Args:
            send: flat, contiguous; may be empty.
            receive_size: the number of elements to receive; may be zero.

        Returns:
            A function that waits and returns the received tensor, flat.
        """
        send_sizes, receive_sizes = [0] * self.size, [0] * self.size
        send_sizes[(self.rank + 1) % self.size] = send.numel()
        receive_sizes[(self.rank - 1) % self.size] = receive_size
        return self.start_all_to_all(send, send_sizes, receive_sizes)

    def send(self, tensor: Tensor, to: int, kind: str = "") -> None:
        """Start to send a tensor to a rank, which calls `receive`. Tensors for the same rank arrive in order.

        Args:
            tensor: any shape; an empty tensor is not sent.
            to: the receiving rank's number in this communicator.
            kind: the meter's name for this traffic, if not the axis's.
        """
        self._pending_sends = [(work, buffer) for work, buffer in self._pending_sends if not work.is_completed()]
        if tensor.numel():
            self._count_pair(self.rank, to)
            outgoing = self._outgoing(tensor)
            (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, outgoing, self._ranks[to], self._group)])
            self._pending_sends.append((work, outgoing))
            self._count(tensor.numel(), tensor.dtype, kind)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Wait for the next tensor from a rank and return it."""
        return self.start_receive(shape, dtype, source)()

    def start_receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Callable[[], Tensor]:
        """Start to receive the next tensor from a rank.

        Args:
            shape: the tensor's shape.
            dtype: the tensor's dtype.
            source: the sending rank's number in this communicator.

        Returns:
            A function that waits and returns the tensor.
        """
        size = torch.Size(shape).numel()
        received = self._buffer(size, dtype)
        works: Sequence[dist.Work] = ()
        tally = self._meter.tally
        if size:
            self._count_pair(source, self.rank)
            works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, self._ranks[source], self._group)])
            for work in works:
                tally.add_pending(work)

        def wait() -> Tensor:
            with self._meter.wait(self.name):
                for work in works:
                    tally.wait(work)
            return self._incoming(received).view(*shape)

        return wait

    def finish_sending(self) -> None:
        """Wait until all tensors have been sent."""
        for work, _ in self._pending_sends:
            work.wait()
        self._pending_sends.clear()

    def scatter(self, send: Tensor | None, sizes: Sequence[int], kind: str) -> Tensor:
        """Send each rank one piece of rank 0's tensor. A collective.

        Args:
            send: on rank 0 a flat fp32 tensor of `sum(sizes)` elements; None on the other ranks.
            sizes: the number of elements for each rank.
            kind: the meter's name for this traffic.

        Returns:
            This rank's piece, flat fp32.
        """
        if self.rank == 0:
            assert send is not None
            return self.all_to_all(send, sizes, [sizes[0]] + [0] * (self.size - 1), kind)
        empty = torch.empty(0, device=self.device)
        return self.all_to_all(empty, [0] * self.size, [sizes[self.rank]] + [0] * (self.size - 1), kind)

    def all_gather(self, local: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenate every rank's tensor along dim 1 in rank order, on every rank. A collective.

        Args:
            local: `[batch, sizes[rank], channels]`.
            sizes: the length of each rank's tensor along dim 1; may differ.

        Returns:
            `[batch, sum(sizes), channels]`.
        """
        if self.size == 1:
            return local
        batch, _, channels = local.shape
        flat = local.reshape(-1)
        counts = [batch * size * channels for size in sizes]
        received = self.all_to_all(flat.repeat(self.size), [flat.numel()] * self.size, counts)
        pieces = zip(received.split(counts), sizes, strict=True)
        return torch.cat([piece.view(batch, size, channels) for piece, size in pieces], dim=1)

    def barrier(self) -> None:
        """Wait until every rank calls this. For CPU tensors only: on a GPU the stream would wait, and not the host."""
        assert self.device.type == "cpu"
        self.all_gather(torch.zeros(1, 1, 1), [1] * self.size)

    def start_all_gather_into(self, whole: Tensor, shard: Tensor) -> Callable[[], None]:
        """Start to fill `whole` with every rank's shard, in rank order. A collective.

        Args:
            whole: flat, contiguous, `size` times as long as `shard`. It must not be used before the wait.
            shard: flat, contiguous, of equal length on all ranks. It must not be changed before the wait.

        Returns:
            A function that waits.
        """
        assert not self._staged, "shards are gathered in place"
        tally = self._meter.tally
        tally.count(self.name, self._ranks)
        work = dist.all_gather_into_tensor(whole, shard, group=self._group, async_op=True)
        tally.add_pending(work)
        self._count((self.size - 1) * shard.numel(), shard.dtype)

        def wait() -> None:
            with self._meter.wait(self.name):
                tally.wait(work)

        return wait

    def _count(self, elements: int, dtype: torch.dtype, kind: str = "") -> None:
        """Count the bytes that this rank sends."""
        self._meter.sent[kind or self.name] += elements * dtype.itemsize

    def _count_pair(self, source: int, to: int) -> None:
        """Count one tensor between two ranks; both of them call this."""
        pair = self._ranks[source], self._ranks[to]
        self._meter.tally.count(f"{self.name} from {pair[0]}", pair)

    def _outgoing(self, tensor: Tensor) -> Tensor:
        """Return the tensor that the process group sends: contiguous, or copied to pinned host memory."""
        if not self._staged:
            return tensor.contiguous()
        return empty_pinned(tensor.shape, tensor.dtype).copy_(tensor)

    def _buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return an empty flat tensor that the process group receives into."""
        if self._staged:
            return empty_pinned((size,), dtype)
        return torch.empty(size, dtype=dtype, device=self.device)

    def _incoming(self, tensor: Tensor) -> Tensor:
        """Return a received tensor on this communicator's device."""
        return tensor.to(self.device) if self._staged else tensor

"""A communicator over one mesh axis, with the primitives that every parallel form is made of.

Activations travel by `all_to_all_single` with splits, also round a ring, and between stages by `batch_isend_irecv`: pairs that
are not batched work on gloo and deadlock on NCCL. Shares of weights, which are equal, are gathered. NCCL's send and recv keep
a buffer until the GPU gets there, when the host is many blocks ahead; its collectives do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..transfers import pinned
from .meter import Meter

PATTERN, ON_HOST = 1 << 16, 1 << 6
"""Elements of what is sent to try a connection: between GPUs enough that it takes the way that activations take."""


def same(received: Tensor, expected: Tensor) -> bool:
    """Whether they are equal; waits for the device."""
    return torch.equal(received, expected)


def _patterns(numbers: Sequence[int], elements: int, device: torch.device) -> Tensor:
    """Flat fp32, a run of so many elements for each number, which tells it from all others."""
    runs = torch.arange(elements, device=device) % 251
    return torch.cat([runs + 256 * number for number in numbers]).float()


class Communicator:
    """The ranks of one mesh axis.

    Args:
        name: what the meter calls this axis's traffic.
        group: the process group of the axis; None where this rank is alone on it.
        device: where the tensors live.
        staged: copy through pinned host memory (gloo between GPUs, where peer-to-peer does not work).
        meter: counts what is sent.
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
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def alone(self) -> Communicator:
        """Return a communicator of this rank only, for work that every rank repeats."""
        return Communicator(self.name, None, self.device, False, self._meter)

    @property
    def traced(self) -> bool:
        """Whether a trace was asked for, and with it checks that take time."""
        return self._meter.trace is not None

    def warm_up(self) -> None:
        """Exchange patterns with every member, which opens every connection now.

        Raises:
            RuntimeError: something else arrives than was sent, as over P2P that a driver reports and that does not work.
        """
        if self.size == 1:
            return
        elements = PATTERN if self.device.type == "cuda" else ON_HOST
        patterns = functools.partial(_patterns, elements=elements, device=self.device)
        sent = patterns([self.rank * self.size + other for other in range(self.size)])
        expected = patterns([other * self.size + self.rank for other in range(self.size)])
        received = self.all_to_all(sent, [elements] * self.size, [elements] * self.size)
        shifted = self.shift(patterns([self.rank]), elements)()
        before = patterns([(self.rank - 1) % self.size])
        if not (same(received, expected) and same(shifted, before)):
            raise RuntimeError(
                f"Data that ranks {self._ranks} exchanged arrived changed on rank {self._ranks[self.rank]}."
            )

    def all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], kind: str = ""
    ) -> Tensor:
        """Send the k-th piece of a flat tensor to rank k and return the pieces received, in rank order.

        Args:
            send: flat, contiguous, `sum(send_sizes)` elements.
            send_sizes: elements for each rank; may differ and may be zero.
            receive_sizes: elements expected from each rank.
            kind: what the meter calls this traffic, if not the axis's name.
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

    def shift(self, send: Tensor, receive_size: int) -> Callable[[], Tensor]:
        """Start passing a flat tensor to the next rank of the ring while receiving from the one before.

        What returns waits for what is received and returns it on the device. Either side may be empty; all members call.
        """
        sizes = [0] * self.size, [0] * self.size
        sizes[0][(self.rank + 1) % self.size] = send.numel()
        sizes[1][(self.rank - 1) % self.size] = receive_size
        return self.begin_all_to_all(send, *sizes)

    def begin_all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> Callable[[], Tensor]:
        """Start what `all_to_all` does; what returns waits for it and returns the pieces. All members call."""
        outgoing = self._outgoing(send)
        received = self._buffer(sum(receive_sizes), send.dtype)
        self._count(sum(send_sizes) - send_sizes[self.rank], send.dtype)
        sizes = list(receive_sizes), list(send_sizes)
        tally = self._meter.tally
        tally.count(self.name, self._ranks)
        work = dist.all_to_all_single(received, outgoing, *sizes, group=self._group, async_op=True)
        tally.start(work)

        def wait() -> Tensor:
            with self._meter.wait(self.name):
                tally.wait(work)
            return self._incoming(received)

        return wait

    def send(self, tensor: Tensor, to: int, kind: str = "") -> None:
        """Start sending a tensor to a member; `receive` there takes it. Sends to one member arrive in order."""
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        if tensor.numel():
            self._count_pair(self.rank, to)
            outgoing = self._outgoing(tensor)
            (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, outgoing, self._ranks[to], self._group)])
            self._sending.append((work, outgoing))
            self._count(tensor.numel(), tensor.dtype, kind)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Wait for the next tensor from a member."""
        return self.expect(shape, dtype, source)()

    def expect(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Callable[[], Tensor]:
        """Begin to receive the next tensor from a member; what returns waits for it."""
        size = torch.Size(shape).numel()
        received = self._buffer(size, dtype)
        works: Sequence[dist.Work] = ()
        tally = self._meter.tally
        if size:
            self._count_pair(source, self.rank)
            works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, self._ranks[source], self._group)])
            for work in works:
                tally.start(work)

        def wait() -> Tensor:
            with self._meter.wait(self.name):
                for work in works:
                    tally.wait(work)
            return self._incoming(received).view(*shape)

        return wait

    def finish_sending(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def scatter(self, send: Tensor | None, sizes: Sequence[int], kind: str) -> Tensor:
        """Rank 0's flat fp32 tensor, cut into runs of `sizes`: each rank gets its own. The others send None."""
        if self.rank == 0:
            assert send is not None
            return self.all_to_all(send, sizes, [sizes[0]] + [0] * (self.size - 1), kind)
        nothing = torch.empty(0, device=self.device)
        return self.all_to_all(nothing, [0] * self.size, [sizes[self.rank]] + [0] * (self.size - 1), kind)

    def gather(self, local: Tensor, sizes: Sequence[int]) -> Tensor:
        """Every rank's run, joined along dim 1 in rank order, on every rank.

        Args:
            local: `[batch, sizes[rank], channels]`.
            sizes: what each rank holds along dim 1.
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
        """Wait until every member is here. On CPU tensors alone: a GPU's stream would wait, and not the host."""
        assert self.device.type == "cpu"
        self.gather(torch.zeros(1, 1, 1), [1] * self.size)

    def gather_into(self, whole: Tensor, share: Tensor) -> Callable[[], None]:
        """Start filling `whole` with every rank's `share`, which are equally long, in rank order; what returns waits for it.

        Args:
            whole: flat, contiguous, `size` times as long as `share`; neither may be used before.
        """
        assert not self._staged, "shares are gathered where they are"
        tally = self._meter.tally
        tally.count(self.name, self._ranks)
        work = dist.all_gather_into_tensor(whole, share, group=self._group, async_op=True)
        tally.start(work)
        self._count((self.size - 1) * share.numel(), share.dtype)

        def wait() -> None:
            with self._meter.wait(self.name):
                tally.wait(work)

        return wait

    def _count(self, elements: int, dtype: torch.dtype, kind: str = "") -> None:
        self._meter.sent[kind or self.name] += elements * dtype.itemsize

    def _count_pair(self, source: int, to: int) -> None:
        """Count what a member sends to another one, which both of them do."""
        pair = self._ranks[source], self._ranks[to]
        self._meter.tally.count(f"{self.name} from {pair[0]}", pair)

    def _outgoing(self, tensor: Tensor) -> Tensor:
        if not self._staged:
            return tensor.contiguous()
        return pinned(tensor.shape, tensor.dtype).copy_(tensor)

    def _buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        if self._staged:
            return pinned((size,), dtype)
        return torch.empty(size, dtype=dtype, device=self.device)

    def _incoming(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device) if self._staged else tensor

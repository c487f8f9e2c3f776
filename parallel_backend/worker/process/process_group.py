"""The process group of all ranks, which relays rank 0's frames and makes all ranks take the same decisions."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.torch_version import TorchVersion

from ...comm.communicator import Communicator
from ...comm.meter import Meter
from ...mesh import NO_TIMEOUT
from ...weights.loading.reading import Neighbours
from ...wire.frames import Frame, encode, worker_decoder
from ...wire.to_worker import RESIDUAL
from .environment import Environment

TEXT_BYTES = 1024


def nccl_settings(version: TorchVersion) -> Mapping[str, str]:
    """Return the environment variables that a version of torch needs when it opens NCCL's communicators.

    Before torch 2.8, collectives keep their buffers until the GPU has finished, as send and recv still do. The variable turns
    this off.
    """
    return {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"} if version < "2.8" else {}


class ProcessGroup:
    """The group of all ranks of this generation, which find each other in `store`."""

    def __init__(self, environment: Environment, store: Store) -> None:
        backend = "gloo"
        if environment.device.type == "cuda":
            torch.cuda.set_device(environment.device)
            for name, value in nccl_settings(torch.__version__).items():
                os.environ.setdefault(name, value)
            backend = "cpu:gloo,cuda:nccl"  # NCCL opens no connection before its first use
        store.set_timeout(NO_TIMEOUT)
        dist.init_process_group(
            backend,
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=NO_TIMEOUT,
        )
        self.rank = environment.rank
        self.size = environment.world_size
        self._control = dist.new_group(backend="gloo", timeout=NO_TIMEOUT)
        self.issued = 0
        """The number of operations of all ranks that this rank has issued. Each request resets it to 0 at its begin."""
        self._subgroups: dict[tuple[tuple[int, ...], ...], Communicator] = {}

    def relay(self, frame: Frame | None, begins: Callable[[], None] = lambda: None) -> Frame:
        """Return rank 0's frame on every rank. Its residuals stay on rank 0. A collective.

        Args:
            frame: the frame on rank 0. Other ranks pass None and wait for a frame.
            begins: called when the frame begins to arrive.
        """
        if frame is not None:
            begins()
        if self.size == 1:
            assert frame is not None
            return frame
        data = None
        if frame is not None:
            shared = {name: tensor for name, tensor in frame.tensors.items() if not name.startswith(RESIDUAL)}
            data = torch.frombuffer(bytearray(encode(frame.message, shared)), dtype=torch.uint8)
        length = torch.tensor([0 if data is None else data.numel()])
        dist.broadcast(length, 0, group=self._control)
        if data is None:
            begins()
            data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._control)
        if frame is not None:
            return frame
        (received,) = worker_decoder().feed(data.numpy().tobytes())
        return received

    def all_gather_text(self, text: str) -> list[str]:
        """Return every rank's text in rank order, cut after a kilobyte. A collective."""
        if self.size == 1:
            return [text]
        self.issued += 1
        buffers = [torch.zeros(TEXT_BYTES, dtype=torch.uint8) for _ in range(self.size)]
        data = text.encode()[:TEXT_BYTES]
        padded = torch.tensor([*data, *bytes(TEXT_BYTES - len(data))], dtype=torch.uint8)
        dist.all_gather(buffers, padded, self._control)
        return [bytes(buffer.tolist()).rstrip(b"\0").decode(errors="replace") for buffer in buffers]

    def broadcast_flag(self, flag: bool) -> bool:
        """Return rank 0's flag on every rank, so that all take the same branch. A collective."""
        if self.size == 1:
            return flag
        self.issued += 1
        value = torch.tensor([int(flag)], dtype=torch.uint8)
        dist.broadcast(value, 0, group=self._control)
        return bool(value)

    def all_true(self, flag: bool) -> bool:
        """Return True on every rank if all ranks pass True. A collective."""
        if self.size == 1:
            return flag
        self.issued += 1
        value = torch.tensor([int(flag)], dtype=torch.uint8)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self._control)
        return bool(value)

    def max_int(self, number: int) -> int:
        """Return the largest of all ranks' numbers on every rank. A collective."""
        if self.size == 1:
            return number
        self.issued += 1
        value = torch.tensor([number])
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._control)
        return int(value)

    def neighbours(self, meter: Meter) -> Neighbours:
        """Return a communicator of all ranks, and the machine of each rank. A collective."""
        group = self._control if self.size > 1 else None
        everyone = Communicator("loading", group, torch.device("cpu"), False, meter)
        kernel = uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        boot = uuid.uuid5(kernel, socket.gethostname())  # containers of one machine may not see the same files
        ours = torch.tensor([[list(boot.bytes)]], dtype=torch.uint8)
        boots = [tuple(rank) for rank in everyone.all_gather(ours, [1] * self.size)[0].tolist()]
        return Neighbours(everyone, tuple(boots.index(boot) for boot in boots))

    def split_by_value(self, values: Sequence[Hashable], meter: Meter) -> Communicator:
        """Return a communicator of the ranks whose value equals this rank's. A collective.

        Args:
            values: one value for each rank, the same sequence on all ranks.
            meter: counts bytes and waits.

        Returns:
            A communicator for CPU tensors.
        """
        ranks = tuple(
            tuple(rank for rank in range(self.size) if values[rank] == value) for value in dict.fromkeys(values)
        )
        if ranks not in self._subgroups:
            group = None
            if self.size > 1:
                self.issued += 1
                group, _ = dist.new_subgroups_by_enumeration([*map(list, ranks)], timeout=NO_TIMEOUT, backend="gloo")
            self._subgroups[ranks] = Communicator("subgroup", group, torch.device("cpu"), False, meter)
        return self._subgroups[ranks]

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

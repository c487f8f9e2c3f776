"""Memory of the machine's that several of its processes have, from which GPUs copy at full speed."""

from __future__ import annotations

import logging
import mmap
import os
import weakref

import torch
from torch import Tensor

from ...comm.communicator import Communicator
from ...transfers import NOT_PINNED, clear_cuda_error

log = logging.getLogger(__name__)

HOST = torch.device("cpu")

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all GPUs that this process uses."""


def shared_bytes(nbytes: int, sharers: Communicator, device: torch.device) -> Tensor:
    """Bytes (uint8) that all sharers see, which are processes of this machine and of one user. A collective.

    It is memory of the kernel's (memfd): it takes none of /dev/shm, which is small in containers, and goes with its last user.
    Where `device` is a GPU it is pinned for it.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    descriptor = -1
    if sharers.rank == 0:
        descriptor = os.memfd_create("parallel weights", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
    where = torch.tensor([[[os.getpid()], [descriptor]]])
    process, number = sharers.all_gather(where, [2] * sharers.size)[0, :2, 0].tolist()
    if sharers.rank:
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    memory = mmap.mmap(descriptor, nbytes)
    sharers.barrier()  # until then the others may not have opened it
    os.close(descriptor)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type == "cuda":
        pin(data)
    return data


def pin(data: Tensor) -> None:
    """Let the GPU's copy engine use it, as long as it lives. Where the system forbids that, copies are slower and wait."""
    cudart, address = torch.cuda.cudart(), data.data_ptr()
    if error := int(cudart.cudaHostRegister(address, data.nbytes, PORTABLE)):
        log.warning("Parallel: of %d bytes, %s (CUDA error %d)", data.nbytes, NOT_PINNED, error)
        clear_cuda_error()
    else:
        weakref.finalize(data.untyped_storage(), cudart.cudaHostUnregister, address).atexit = False

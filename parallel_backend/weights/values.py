"""The values of single tensors of a file: for the few that ComfyUI's process needs itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import Refused
from .files.entry import Entry


def values_of(entry: Entry) -> Tensor:
    """A tensor's values, read from its bytes of the file and from no others.

    Raises:
        Refused: it is stored in quantised blocks, or the file ends early.
    """
    if entry.dtype is None or entry.parts:
        raise Refused(
            f"{entry.file.name} holds a tensor as {entry.storage.name} that is needed as it is: choose a .safetensors file."
        )
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    data = bytearray(entry.nbytes)
    view, done = memoryview(data), 0
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.offset)
        while done < entry.nbytes:
            read = file.readinto(view[done:])
            if not read:
                raise Refused(f"{entry.file.name} ends early: download it again.")
            done += read
    return torch.frombuffer(data, dtype=entry.dtype).view(entry.shape)

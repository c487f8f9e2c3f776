"""The values of single tensors of a file: for the few that ComfyUI's classes need while they are detected or built."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ..errors import Refused
from .files.entry import TensorEntry


def values_of(entry: TensorEntry) -> Tensor:
    """Return a tensor's values, read from its bytes of the file and from no others.

    Values that are stored in blocks are expanded to fp32. Others keep their type, and are multiplied by their scale if they
    have one.

    Raises:
        Refused: the tensor is of a type that cannot be read, or the file cannot be read or ends early.
    """
    if entry.parts:
        return torch.cat([values_of(part)[start:stop] for part, start, stop in entry.parts])
    storage = entry.storage
    if not storage.readable:
        raise Refused(
            f"{entry.file.name} holds a tensor as {storage.name}, which cannot be read here and is needed: choose another file."
        )
    data = _bytes_of(entry)
    if storage.dtype is None:
        values = storage.expand(data.view(1, -1), torch.float32).view(entry.shape)
    else:
        values = data.view(storage.dtype).view(entry.shape)
    if entry.scale is None:
        return values
    scale = values_of(entry.scale).float()
    return values.float() * (scale if scale.numel() == 1 else scale.view(-1, *[1] * (values.ndim - 1)))


def _bytes_of(entry: TensorEntry) -> Tensor:
    data = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
    view, done = memoryview(data.numpy().data), 0
    try:
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            while done < entry.nbytes:
                read = file.readinto(view[done:])
                if not read:
                    raise Refused(f"{entry.file.name} ends early: download it again.")
                done += read
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise Refused(f"{entry.file.name} cannot be read ({reason}): check the disk and its permissions.") from error
    return data

"""Detection of a file's model by ComfyUI's own code, from the file's header."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ...errors import Refused
from ...weights.files.checkpoint import Checkpoint
from .diffusers_names import converted
from .file_values import ValueUnknown, file_values
from .moved_rows import moved_rows
from .quantisation import Opened, open_checkpoint

DIFFUSERS_PREFIX = "transformer."
"""The prefix of diffusers' names in a file that was saved with the rest of its pipeline."""

AROUND_ATTENTION = (".proj_in.weight", ".proj_out.weight")

DAMAGE = (LookupError, ValueError, TypeError, RuntimeError, ArithmeticError, AssertionError, MemoryError)
"""Exceptions that ComfyUI's code raises for tensors that fit no model."""


def detect(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Tensor], Any]:
    """Return the model's tensors under the names of ComfyUI's loader, their quantisation, and an instance of the model's class.

    Raises:
        Refused: ComfyUI does not know the model or cannot build it, or changes the tensors by more than names and rows.
    """
    opened = open_checkpoint(checkpoint)
    described = _described(opened)
    if described is None and checkpoint.drops_ones:
        opened = open_checkpoint(without_ones(checkpoint))
        described = _described(opened)
    if described is None:
        bare = checkpoint.select(DIFFUSERS_PREFIX, str)
        renamed = converted(bare if bare.entries else checkpoint)
        if renamed is not None:
            opened = open_checkpoint(renamed)
            described = _described(opened)
    if described is None:
        raise Refused(
            f"{checkpoint.path.name} is no diffusion model that ComfyUI knows under these tensor names: choose another file."
        )
    try:
        with file_values(opened.pairs()):
            tensors = described.process_unet_state_dict(dict(opened.tensors))
            rows = moved_rows(described.process_unet_state_dict, opened.tensors, tensors, opened.entries())
    except DAMAGE as error:
        raise unmakable(checkpoint, error) from None
    return *opened.under(tensors, rows), described


def without_ones(checkpoint: Checkpoint) -> Checkpoint:
    """Return a GGUF file in which 1 x 1 convolutions around attention are matrices.

    stable-diffusion.cpp writes SDXL's linear layers as convolutions.
    """
    entries = {
        name: replace(entry, shape=entry.shape[:2])
        if name.endswith(AROUND_ATTENTION) and entry.shape[2:] == (1,) * len(entry.shape[2:])
        else entry
        for name, entry in checkpoint.entries.items()
    }
    return replace(checkpoint, entries=entries)


def _described(opened: Opened) -> Any:
    import comfy.model_detection

    metadata = dict(opened.checkpoint.metadata)
    try:
        with file_values(opened.pairs()):
            return comfy.model_detection.model_config_from_unet(dict(opened.tensors), "", metadata=metadata)
    except DAMAGE as error:
        raise unmakable(opened.checkpoint, error) from None


def unmakable(part: Checkpoint, error: Exception) -> Refused:
    """Return the error for a file on whose tensors ComfyUI's code fails."""
    if isinstance(error, Refused):  # a value could not be read
        return error
    if isinstance(error, ValueUnknown):
        return Refused(
            f"{part.path.name} is of a class that reads values of tensors during its construction ({error}), which is "
            "not supported: use Load Diffusion Model."
        )
    first = str(error).strip().partition("\n")[0].rstrip(".")
    return Refused(
        f"{part.path.name} has tensors from which ComfyUI cannot make a model ({type(error).__name__}: {first}): "
        "choose another file."
    )

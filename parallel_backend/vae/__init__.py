"""Autoencoders that decode and encode exactly on several ranks. Each rank holds a run of the picture's rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..errors import Refused
from ..models.diffusers.diffusers_family import check_diffusers, of_diffusers
from ..weights.files.checkpoint import Checkpoint
from .autoencoder import SCHEDULES, Autoencoder, AutoencoderFamily
from .cogvideox import CogVideoXAutoencoderFamily
from .comfyui import ComfyAutoencoderFamily

AUTOENCODERS: Mapping[str, AutoencoderFamily] = MappingProxyType(
    {"cogvideox vae": CogVideoXAutoencoderFamily(), "comfyui vae": ComfyAutoencoderFamily()}
)
"""Kinds of autoencoders that the backend runs, by name."""

PREFIXES = ("", "first_stage_model.", "vae.")
"""Prefixes of a VAE's tensor names, in its own file and in full checkpoints."""

__all__ = ["AUTOENCODERS", "SCHEDULES", "Autoencoder", "AutoencoderFamily", "recognise"]


def recognise(checkpoint: Checkpoint) -> tuple[str, Checkpoint, Any]:
    """Recognise the kind of autoencoder that a file holds.

    Returns:
        Its name in AUTOENCODERS, the autoencoder's own tensors, named without prefix, and its configuration.

    Raises:
        Refused: the file holds none of the kinds, or lacks tensors, or needs a version of diffusers that is not installed.
    """
    for prefix in PREFIXES:
        part = checkpoint.select(prefix, lambda name: name)
        for name, family in AUTOENCODERS.items():
            if family.recognises(part):
                if of_diffusers(family.imports):
                    check_diffusers()  # diffusers' modules define the tensors that a file must have
                try:
                    config = family.configure(part)
                except KeyError as missing:
                    raise Refused(
                        f"{checkpoint.path.name} lacks the tensor {missing}: choose a complete VAE file."
                    ) from None
                family.keys(config, part)
                return name, part, config
    raise Refused(f"{checkpoint.path.name} has no tensors of a VAE: choose a VAE file.")

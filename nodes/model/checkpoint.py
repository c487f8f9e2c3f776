"""A full checkpoint: its diffusion model in the workers, its text encoder and VAE in ComfyUI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import comfy.model_detection
import comfy.sd
import comfy.utils
import folder_paths
from torch import Tensor

from ...parallel_backend.errors import Refused
from ...parallel_backend.host import Backend
from ...parallel_backend.models.comfyui.file_values import file_values, named_values
from ...parallel_backend.plan import ParallelPlan
from ...parallel_backend.weights.files.checkpoint import Checkpoint, read_header
from ...parallel_backend.weights.values import values_of
from .build import load_model

EMBEDDINGS = "embeddings"
"""Key of ComfyUI's folder of textual inversion embeddings."""


@dataclass(frozen=True)
class CheckpointTensors:
    """A checkpoint's tensors by their names. Those of the diffusion model have no data, and the others do.

    Another tensor without data is of a type that cannot be read.
    """

    checkpoint: Checkpoint
    model: Mapping[str, Tensor]
    other_tensors: Mapping[str, Tensor]


def load_checkpoint(backend: Backend, path: str, plan: ParallelPlan) -> tuple[Any, Any, Any]:
    """Return the MODEL, the CLIP and the VAE of a checkpoint. Start no worker yet.

    Raises:
        Refused: the file or the plan cannot work.
    """
    parts = parts_of(path)
    model = load_model(backend, "comfyui", path, "default", plan, other_tensors=parts.other_tensors)
    refuse_another_class(read_header(path), model.model.model_config)
    return model, *clip_and_vae(path, parts)


def parts_of(path: str) -> CheckpointTensors:
    """Read a checkpoint. Read only the header of its diffusion model's tensors.

    Raises:
        Refused: the file cannot be read, or is a pickle.
    """
    checkpoint = read_header(path)
    tensors = checkpoint.meta_tensors()
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    inside = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    other_tensors = {
        name: values_of(entry) if entry.storage.readable else tensors[name]
        for name, entry in checkpoint.entries.items()
        if name not in inside
    }
    return CheckpointTensors(checkpoint, inside, other_tensors)


def refuse_another_class(checkpoint: Checkpoint, alone: Any) -> None:
    """Refuse a checkpoint if ComfyUI detects another class for the checkpoint than for its diffusion model alone.

    Args:
        checkpoint: the whole file. This function reads the header and the values that ComfyUI asks for.
        alone: ComfyUI's configuration of the diffusion model alone.

    Raises:
        Refused: the classes differ, as for Stable Zero123, which ComfyUI knows by a tensor outside its diffusion model.
    """
    tensors = checkpoint.meta_tensors()
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    if not any(name.startswith(prefix) for name in tensors):
        return
    with file_values(named_values(tensors, checkpoint.entries)):
        every, metadata = comfy.utils.convert_old_quants(dict(tensors), prefix, metadata=dict(checkpoint.metadata))
        detected = type(comfy.model_detection.model_config_from_unet(every, prefix, metadata=metadata))
    if detected is not type(alone):
        raise Refused(
            f"{checkpoint.path.name} is a {detected.__name__} checkpoint, but ComfyUI takes its diffusion model alone for a "
            f"{type(alone).__name__}, so the workers cannot run it: use Load Checkpoint."
        )


def clip_and_vae(path: str, parts: CheckpointTensors) -> tuple[Any, Any]:
    """Return the text encoder (None if there is none) and the VAE of a checkpoint, made by ComfyUI's own loader."""
    if not parts.model:  # the file has a diffusion model alone
        return None, comfy.sd.VAE(sd={})
    embeddings = folder_paths.get_folder_paths(EMBEDDINGS)
    tensors = {**parts.model, **parts.other_tensors}
    with file_values(named_values(tensors, parts.checkpoint.entries)):
        _, clip, vae, _ = comfy.sd.load_state_dict_guess_config(
            tensors, output_model=False, embedding_directory=embeddings, metadata=dict(parts.checkpoint.metadata)
        )
    for part, again in ((clip, "load_checkpoint_clip_patcher"), (vae, "load_checkpoint_vae_patcher")):
        if getattr(part, "patcher", None) is not None:  # for ComfyUI's nodes that put one on another device
            part.patcher.cached_patcher_init = (getattr(comfy.sd, again), (path, embeddings, {}, {}))
    return clip, vae

"""A full checkpoint: its diffusion model in the workers, and its text encoder and VAE, which stay ComfyUI's own."""

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
"""ComfyUI's folder of words that text encoders learn."""


@dataclass(frozen=True)
class CheckpointTensors:
    """A checkpoint's tensors, by their names in it: the diffusion model's without data, the others with theirs.

    Others of a type that cannot be read are without data too.
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
    """Read a checkpoint: of its diffusion model the header alone.

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
    """Refuse a checkpoint that ComfyUI takes to be of another class than its diffusion model is by itself.

    Args:
        checkpoint: the whole file; only its header is read, and the values that ComfyUI asks for.
        alone: ComfyUI's configuration of the diffusion model alone.

    Raises:
        Refused: with that class, as of Stable Zero123, which is known by a tensor beside its diffusion model.
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
            f"{checkpoint.path.name} is a {detected.__name__} checkpoint, whose diffusion model alone is a "
            f"{type(alone).__name__}, which is not supported: use Load Checkpoint."
        )


def clip_and_vae(path: str, parts: CheckpointTensors) -> tuple[Any, Any]:
    """ComfyUI's text encoder and VAE of a checkpoint, made by its own loader; the first is None where there is none."""
    if not parts.model:  # a file of a diffusion model alone
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

"""Files of a class that nobody declared, in each form that users have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from tests.support.tiny.comfyui import TINY
from tests.support.tiny.formats import quantise, write_scaled
from tests.support.tiny.quantised import save_quantised

Tensors = Mapping[str, torch.Tensor]
Metadata = Mapping[str, str]


def _scaled(form: str, path: Path, tensors: Tensors, metadata: Metadata) -> None:
    write_scaled(path, tensors, form, more=metadata)


def _quantised(form: str, path: Path, tensors: Tensors, metadata: Metadata) -> None:
    save_quantised(path, tensors, form, metadata=metadata)


def _gguf(kind: Type, path: Path, tensors: Tensors, metadata: Metadata) -> None:
    quantise(path, path.with_suffix(".safetensors"), kind, tensors, metadata)


def save_checkpoint(path: Path, tensors: Tensors, metadata: Metadata) -> None:
    """Save the tensors with a checkpoint's prefix, as if a text encoder and a VAE were in the file too."""
    path.parent.mkdir(exist_ok=True)
    save_file({f"model.diffusion_model.{key}": tensor for key, tensor in tensors.items()}, path, dict(metadata))


FORMS: Mapping[str, Callable[[Path, Tensors, Metadata], None]] = {
    "old.safetensors": partial(_scaled, "old"),
    "marks.safetensors": partial(_scaled, "marks"),
    "metadata.safetensors": partial(_scaled, "metadata"),
    "nvfp4.safetensors": partial(_quantised, "nvfp4"),
    "int8.safetensors": partial(_quantised, "int8"),
    "checkpoint.safetensors": save_checkpoint,
    "q8_0.gguf": partial(_gguf, Type.Q8_0),
    "q4_k.gguf": partial(_gguf, Type.Q4_K),
}
"""Writers of test files, by the ending of the file's name. The writer of a GGUF file also writes the file's values next to it."""


def save_forms(folder: Path, name: str) -> None:
    """Save a model's file in each form, with the metadata of the plain file, which exists already."""
    tensors, metadata = load_file(folder / f"{name}.safetensors"), TINY[name].metadata or {}
    for form, save in FORMS.items():
        save(folder / f"{name}-{form}", tensors, metadata)

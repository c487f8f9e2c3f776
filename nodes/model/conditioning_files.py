"""Prompts as safetensors files in ComfyUI's input folder: the text, its pooled output and mask, and FluxGuidance."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import folder_paths
import safetensors.torch
import torch
from torch import Tensor

from ...parallel_backend.errors import Refused
from ...parallel_backend.weights.files.checkpoint import read_header

TENSORS = ("pooled_output", "attention_mask")
SUFFIX = ".safetensors"


def path_of(name: str) -> str:
    """Return the path of a file.

    Raises:
        Refused: the name leads out of ComfyUI's folders, or is no valid file name.
    """
    try:
        return str(folder_paths.get_annotated_filepath(name))
    except ValueError:
        raise Refused(f"{name} is not in ComfyUI's input folder: put it there or pick another file.") from None


def read(name: str) -> list[Any]:
    """Read a file as a CONDITIONING of one entry.

    Raises:
        Refused: the file is no saved prompt.
    """
    path = path_of(name)
    read_header(path)  # raises Refused, with the reason, if the file is not a safetensors file
    tensors = safetensors.torch.load_file(path, device="cpu")
    if "cond" not in tensors:
        raise _no_text(name)
    options: dict[str, Any] = {name: tensors[name] for name in TENSORS if name in tensors}
    if "guidance" in tensors:
        options["guidance"] = float(tensors["guidance"].flatten()[0])
    return [[tensors["cond"], options]]


def text_tokens(name: str) -> int:
    """Return the number of tokens of a file's text, from the header.

    Raises:
        Refused: the file is no saved prompt.
    """
    text = read_header(path_of(name)).entries.get("cond")
    if text is None or len(text.shape) < 2:
        raise _no_text(name)
    return text.shape[1]


def _no_text(name: str) -> Refused:
    return Refused(f"{name} has no tensor named cond: pick a file that Save Conditioning wrote.")


def write(conditioning: list[Any], prefix: str) -> tuple[str, str]:
    """Write a new file, whole or not at all, and return its name and subfolder.

    Raises:
        Refused: something of the prompt would be lost, or the file cannot be written.
    """
    tensors = _tensors(conditioning)
    try:
        return _write(tensors, prefix)
    except (OSError, safetensors.SafetensorError) as error:
        raise Refused(
            f"{prefix} could not be written to ComfyUI's input folder ({error}): make room there or choose another name."
        ) from error


def _write(tensors: Mapping[str, Tensor], prefix: str) -> tuple[str, str]:
    """Write a new file in the input folder, and return its name and subfolder."""
    directory = folder_paths.get_input_directory()
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, directory)
    while (file := Path(folder, f"{name}_{counter:05}_{SUFFIX}")).exists():  # ComfyUI's counter is wrong for "name/"
        counter += 1
    partial = file.with_name(f".{file.name}.part")
    try:
        safetensors.torch.save_file(dict(tensors), partial)
        partial.replace(file)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return file.name, subfolder


def _tensors(conditioning: list[Any]) -> dict[str, Tensor]:
    if len(conditioning) != 1:
        raise Refused(
            f"Save Conditioning writes one prompt and was given {len(conditioning)} combined ones: save each before "
            "combining them."
        )
    cond, options = conditioning[0]
    known = (*TENSORS, "guidance")
    lost = sorted(name for name, value in options.items() if name not in known and value is not None)
    if lost:
        raise Refused(
            f"Save Conditioning saves the text, {', '.join(known)}; this prompt also has {', '.join(lost)}: save it "
            "before the nodes that add those."
        )
    tensors = {"cond": cond.contiguous()}
    tensors |= {name: options[name].contiguous() for name in TENSORS if options.get(name) is not None}
    if options.get("guidance") is not None:
        tensors["guidance"] = torch.tensor([float(options["guidance"])])
    return tensors

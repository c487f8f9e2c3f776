"""Load Conditioning and Save Conditioning: prompts as safetensors files, to share them and skip the text encoder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import folder_paths
import safetensors.torch
import torch
from comfy_api.latest import io

from ..parallel_backend.errors import Refused
from ..parallel_backend.weights.files.checkpoint import read_header
from .runtime import CATEGORY

TENSORS = ("pooled_output", "attention_mask")
SUFFIX = ".safetensors"


class LoadConditioning(io.ComfyNode):
    """Reads a CONDITIONING from a file in ComfyUI's input folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """One file."""
        directory = Path(folder_paths.get_input_directory())
        files = sorted(path.relative_to(directory).as_posix() for path in directory.rglob(f"*{SUFFIX}"))
        return io.Schema(
            node_id="LoadConditioning",
            display_name="Load Conditioning",
            category=CATEGORY,
            description="Reads a prompt that Save Conditioning wrote; no text encoder is needed.",
            search_aliases=["load prompt", "load text embedding", "conditioning from file"],
            inputs=[
                io.Combo.Input(
                    "conditioning",
                    options=files,
                    tooltip="A .safetensors file in ComfyUI's input folder with the tensor cond and, optionally, "
                    "pooled_output, guidance and attention_mask.",
                )
            ],
            outputs=[io.Conditioning.Output(tooltip="As if it came from a text encoder.")],
        )

    @classmethod
    def validate_inputs(cls, conditioning: str) -> bool | str:
        """The file may have been added after the page was loaded."""
        if folder_paths.exists_annotated_filepath(conditioning):
            return True
        return f"{conditioning} is not in ComfyUI's input folder: put it there or pick another file."

    @classmethod
    def fingerprint_inputs(cls, conditioning: str) -> str:
        """A file that was replaced is read again."""
        path = folder_paths.get_annotated_filepath(conditioning)
        status = os.stat(path)
        return f"{status.st_mtime_ns} {status.st_size}"

    @classmethod
    def execute(cls, conditioning: str) -> io.NodeOutput:
        """The file as a CONDITIONING of one entry."""
        path = folder_paths.get_annotated_filepath(conditioning)
        read_header(path)  # says in one sentence what is wrong with a file that is none
        tensors = safetensors.torch.load_file(path, device="cpu")
        if "cond" not in tensors:
            raise Refused(f"{conditioning} has no tensor named cond: pick a file that Save Conditioning wrote.")
        options: dict[str, Any] = {name: tensors[name] for name in TENSORS if name in tensors}
        if "guidance" in tensors:
            options["guidance"] = float(tensors["guidance"].flatten()[0])
        return io.NodeOutput([[tensors["cond"], options]])


class SaveConditioning(io.ComfyNode):
    """Writes a CONDITIONING to ComfyUI's input folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """A CONDITIONING and a name."""
        return io.Schema(
            node_id="SaveConditioning",
            display_name="Save Conditioning",
            category=CATEGORY,
            description="Writes a prompt to a .safetensors file in ComfyUI's input folder, for Load Conditioning.",
            search_aliases=["save prompt", "save text embedding", "conditioning to file"],
            is_output_node=True,
            inputs=[
                io.Conditioning.Input("conditioning", tooltip="A prompt from a text encoder; FluxGuidance is kept."),
                io.String.Input(
                    "filename_prefix",
                    default="conditioning",
                    tooltip="The file's name; a number is added, so nothing is overwritten.",
                ),
            ],
        )

    @classmethod
    def execute(cls, conditioning: list[Any], filename_prefix: str) -> io.NodeOutput:
        """Write the file; it appears whole or not at all."""
        tensors = _tensors(conditioning)
        try:
            file, subfolder = _write(tensors, filename_prefix)
        except (OSError, safetensors.SafetensorError) as error:
            raise Refused(
                f"{filename_prefix} could not be written to ComfyUI's input folder ({error}): make room there or choose "
                "another name."
            ) from error
        shown = [{"filename": file, "subfolder": subfolder, "type": "input"}]
        return io.NodeOutput(ui={"conditioning": shown})


def _write(tensors: dict[str, torch.Tensor], prefix: str) -> tuple[str, str]:
    """Write a new file in the input folder; returns its name and subfolder."""
    directory = folder_paths.get_input_directory()
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, directory)
    while (file := Path(folder, f"{name}_{counter:05}_{SUFFIX}")).exists():  # the counter is wrong for "name/"
        counter += 1
    partial = file.with_name(f".{file.name}.part")
    try:
        safetensors.torch.save_file(tensors, partial)
        partial.replace(file)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return file.name, subfolder


def _tensors(conditioning: list[Any]) -> dict[str, torch.Tensor]:
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
            f"Save Conditioning keeps the text, {', '.join(known)}; this prompt also has {', '.join(lost)}: save it "
            "before the nodes that add those."
        )
    tensors = {"cond": cond.contiguous()}
    tensors |= {name: options[name].contiguous() for name in TENSORS if options.get(name) is not None}
    if options.get("guidance") is not None:
        tensors["guidance"] = torch.tensor([float(options["guidance"])])
    return tensors

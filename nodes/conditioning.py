"""Load Conditioning and Save Conditioning, nodes that read and write prompts as safetensors files.

With such a file, users share a prompt and run without a text encoder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io

from .model.conditioning_files import SUFFIX, read, write
from .runtime import CATEGORY


class LoadConditioning(io.ComfyNode):
    """A node that reads a CONDITIONING from a file in ComfyUI's input folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare the choice of a file."""
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
        """Accept any file that exists: the user may have added the file after the page was loaded."""
        if folder_paths.exists_annotated_filepath(conditioning):
            return True
        return f"{conditioning} is not in ComfyUI's input folder: put it there or pick another file."

    @classmethod
    def fingerprint_inputs(cls, conditioning: str) -> str:
        """Return the file's time and size, so that ComfyUI reads a replaced file again."""
        path = folder_paths.get_annotated_filepath(conditioning)
        status = os.stat(path)
        return f"{status.st_mtime_ns} {status.st_size}"

    @classmethod
    def execute(cls, conditioning: str) -> io.NodeOutput:
        """Return the file as a CONDITIONING of one entry."""
        return io.NodeOutput(read(conditioning))


class SaveConditioning(io.ComfyNode):
    """A node that writes a CONDITIONING to ComfyUI's input folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare a CONDITIONING and a file name."""
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
        """Write the file. No reader ever sees a part of the file."""
        file, subfolder = write(conditioning, filename_prefix)
        saved_files = [{"filename": file, "subfolder": subfolder, "type": "input"}]
        return io.NodeOutput(ui={"conditioning": saved_files})

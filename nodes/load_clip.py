"""The Load Parallel CLIP node."""

from __future__ import annotations

import os
from collections.abc import Iterable

import folder_paths
from comfy_api.latest import io

import nodes as comfy_nodes  # type: ignore[import-not-found]

from ..parallel_backend.plan import ParallelPlan
from . import without_plan
from .clip.clip import load_clip
from .model.files import CHECKPOINTS, path_in
from .parallel_plan import PlanType
from .runtime import CATEGORY, backend

FOLDER = "text_encoders"

FURTHER = ("clip_name2", "clip_name3", "clip_name4")

NONE = "none"
"""The choice for no further file."""


def types() -> list[str]:
    """Return all types of ComfyUI's loaders of text encoders."""
    kinds: dict[str, None] = {}
    for loader in (comfy_nodes.CLIPLoader, comfy_nodes.DualCLIPLoader):
        kinds |= dict.fromkeys(loader.INPUT_TYPES()["required"]["type"][0])
    return list(kinds)


def further_choices() -> list[str]:
    """Return the choices for a further file: text encoders and full checkpoints.

    A checkpoint has its plain name, as in Load LTXV Audio Text Encoder, so that a field of a subgraph may set both nodes. If a
    text encoder has the same name, the checkpoint's choice has the folder's name as a prefix.
    """
    files = folder_paths.get_filename_list(FOLDER)
    full = folder_paths.get_filename_list(CHECKPOINTS)
    return [NONE, *files, *(f"{CHECKPOINTS}/{name}" if name in files else name for name in full)]


def places_of(name: str, further: Iterable[str]) -> list[tuple[str, str]]:
    """Return the model folder of each file, and the file's name in the folder.

    Args:
        name: the first file, a text encoder.
        further: further files, named as by `further_choices`. A name that is in both folders means the text encoder.
    """

    def place_of(choice: str) -> tuple[str, str]:
        plain = choice.removeprefix(f"{CHECKPOINTS}/")
        places = ((FOLDER, choice), (CHECKPOINTS, choice), (CHECKPOINTS, plain))
        return next((place for place in places if folder_paths.get_full_path(*place)), places[0])

    return [(FOLDER, name), *map(place_of, further)]


class LoadParallelCLIP(io.ComfyNode):
    """A node that loads a text encoder. Worker processes hold the weights, one process per device."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare the inputs of ComfyUI's loaders of text encoders, and a plan."""
        further = further_choices()
        return io.Schema(
            node_id="LoadParallelCLIP",
            display_name="Load Parallel CLIP",
            category=CATEGORY,
            description="Takes the place of ComfyUI's loaders of text encoders: the same encoder, with its blocks divided over "
            "several GPUs. For encoders that are larger than one GPU; prompts are not encoded faster.",
            search_aliases=["load clip", "text encoder", "clip on several devices", "dual clip loader"],
            inputs=[
                io.Combo.Input(
                    "clip_name",
                    options=folder_paths.get_filename_list(FOLDER),
                    tooltip="A .safetensors file in models/text_encoders.",
                ),
                io.Combo.Input(
                    "type",
                    options=types(),
                    tooltip="The type, as in Load CLIP or DualCLIPLoader: sd3 for three files, hidream for four.",
                ),
                PlanType.Input(
                    "plan",
                    optional=True,
                    tooltip="Which devices to use, and their memory limit; the plan's other settings do not matter to a text "
                    "encoder. Without a plan, the devices of Settings > Parallel apply.",
                ),
                *(
                    io.Combo.Input(
                        name,
                        options=further,
                        optional=True,
                        advanced=True,
                        default=NONE,
                        tooltip="A further file, for the types that take several. LTX-2 takes its own checkpoint, as in Load "
                        "LTXV Audio Text Encoder.",
                    )
                    for name in FURTHER
                ),
                without_plan.devices_input(),
            ],
            outputs=[io.Clip.Output(tooltip="Works with CLIP Text Encode and the other encoding nodes.")],
        )

    @classmethod
    def fingerprint_inputs(cls, clip_name: str, **more: object) -> str:
        """Return the files' times and sizes, so that ComfyUI loads a replaced file again."""
        further = [str(more[name]) for name in FURTHER if more.get(name, NONE) != NONE]
        paths = [path for place in places_of(clip_name, further) if (path := folder_paths.get_full_path(*place))]
        return " ".join(f"{status.st_mtime_ns} {status.st_size}" for status in map(os.stat, paths))

    @classmethod
    def execute(
        cls,
        clip_name: str,
        type: str,
        plan: ParallelPlan | None = None,
        clip_name2: str = NONE,
        clip_name3: str = NONE,
        clip_name4: str = NONE,
        devices: str = without_plan.DEVICES,
    ) -> io.NodeOutput:
        """Check the files and the plan, and return the CLIP. Start no worker yet."""
        further = [name for name in (clip_name2, clip_name3, clip_name4) if name != NONE]
        paths = [path_in(*place) for place in places_of(clip_name, further)]
        plan = without_plan.plan_of(backend(), plan, devices)
        return io.NodeOutput(load_clip(backend(), paths, type, plan))

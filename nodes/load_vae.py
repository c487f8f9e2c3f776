"""The Load Parallel VAE node."""

from __future__ import annotations

import os

import folder_paths
from comfy_api.latest import io

from ..parallel_backend.plan import ParallelPlan
from ..parallel_backend.vae import SCHEDULES
from . import without_plan
from .parallel_plan import PlanType
from .runtime import CATEGORY, backend
from .vae import load_vae

FOLDER = "vae"


class LoadParallelVAE(io.ComfyNode):
    """A node that loads a VAE. Worker processes hold the weights, one process per device."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare the input of Load VAE, and a plan."""
        return io.Schema(
            node_id="LoadParallelVAE",
            display_name="Load Parallel VAE",
            category=CATEGORY,
            description="Takes the place of Load VAE: the same VAE, decoding and encoding on several GPUs, each holding "
            "its share of the picture's rows. For the VAEs of FLUX, Stable Diffusion, Wan, Qwen-Image, LTX-Video, "
            "MiniMax-H3, HunyuanVideo and CogVideoX.",
            search_aliases=["multi gpu vae", "load vae", "parallel decode", "video vae"],
            inputs=[
                io.Combo.Input(
                    "vae_name",
                    options=folder_paths.get_filename_list(FOLDER),
                    tooltip="A VAE in models/vae: FLUX, Stable Diffusion, Wan, Qwen-Image, LTX-Video, MiniMax-H3, "
                    "HunyuanVideo or CogVideoX.",
                ),
                PlanType.Input(
                    "plan",
                    optional=True,
                    tooltip="Which devices to use; the plan's other settings do not matter to a VAE. Without a plan, the devices "
                    "of Settings > Parallel apply.",
                ),
                io.Combo.Input(
                    "frame_batches",
                    options=list(SCHEDULES),
                    optional=True,
                    advanced=True,
                    default=SCHEDULES[0],
                    tooltip="For CogVideoX: which frames are decoded together, which changes the result a little. original: "
                    "as its authors and diffusers do; comfyui: as ComfyUI's VAE Decode does.",
                ),
                without_plan.devices_input(),
            ],
            outputs=[io.Vae.Output(tooltip="Works with VAE Decode, VAE Encode and CogVideoX Parallel Decode.")],
        )

    @classmethod
    def fingerprint_inputs(cls, vae_name: str, **_: object) -> str:
        """Return the file's time and size, so that ComfyUI loads a replaced file again."""
        path = folder_paths.get_full_path(FOLDER, vae_name)
        if path is None:
            return ""
        status = os.stat(path)
        return f"{status.st_mtime_ns} {status.st_size}"

    @classmethod
    def execute(
        cls,
        vae_name: str,
        plan: ParallelPlan | None = None,
        frame_batches: str = SCHEDULES[0],
        devices: str = without_plan.DEVICES,
    ) -> io.NodeOutput:
        """Check the file and the plan, and return the VAE. Start no worker yet."""
        path = folder_paths.get_full_path_or_raise(FOLDER, vae_name)
        plan = without_plan.plan_of(backend(), plan, devices)
        return io.NodeOutput(load_vae(backend(), path, plan, frame_batches))

"""The Load Parallel Checkpoint node."""

from __future__ import annotations

import folder_paths
from comfy_api.latest import io

from ..parallel_backend.plan import ParallelPlan
from ..parallel_backend.plan.plan import AUTOMATIC
from . import without_plan
from .model.checkpoint import load_checkpoint
from .model.files import CHECKPOINTS, fingerprint_of
from .parallel_plan import PlanType
from .runtime import CATEGORY, backend


class LoadParallelCheckpoint(io.ComfyNode):
    """A node that loads a checkpoint.

    The workers hold the diffusion model's weights; ComfyUI has the text encoder and the VAE.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare the input of Load Checkpoint, and a plan."""
        return io.Schema(
            node_id="LoadParallelCheckpoint",
            display_name="Load Parallel Checkpoint",
            category=CATEGORY,
            description="Takes the place of Load Checkpoint: the same MODEL, denoised on several GPUs, with the checkpoint's own "
            "text encoder and VAE. For Stable Diffusion, SDXL, FLUX, LTX and all other models in checkpoints.",
            search_aliases=["multi gpu checkpoint", "sdxl", "stable diffusion", "load checkpoint", "checkpoint loader"],
            inputs=[
                io.Combo.Input(
                    "ckpt_name",
                    options=folder_paths.get_filename_list(CHECKPOINTS),
                    tooltip="A .safetensors file in models/checkpoints.",
                ),
                PlanType.Input(
                    "plan",
                    optional=True,
                    tooltip="Which GPUs to use and how they share the work. Without a plan, the devices and the preset of "
                    "Settings > Parallel apply: by default the GPUs that are faster together.",
                ),
                without_plan.devices_input(),
                without_plan.preset_input(),
            ],
            outputs=[
                io.Model.Output(tooltip="Works with every sampler node."),
                io.Clip.Output(tooltip="The checkpoint's text encoder, as Load Checkpoint gives it."),
                io.Vae.Output(tooltip="The checkpoint's VAE, as Load Checkpoint gives it."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, ckpt_name: str, **_: object) -> str:
        """Return a fingerprint of the file, so that ComfyUI loads a replaced file again."""
        return fingerprint_of(f"{CHECKPOINTS}/{ckpt_name}")

    @classmethod
    def execute(
        cls,
        ckpt_name: str,
        plan: ParallelPlan | None = None,
        devices: str = without_plan.DEVICES,
        preset: str = AUTOMATIC,
    ) -> io.NodeOutput:
        """Check the file and the plan, and return MODEL, CLIP and VAE. Start no worker yet."""
        path = folder_paths.get_full_path_or_raise(CHECKPOINTS, ckpt_name)
        plan = without_plan.plan_of(backend(), plan, devices, preset)
        return io.NodeOutput(*load_checkpoint(backend(), path, plan))

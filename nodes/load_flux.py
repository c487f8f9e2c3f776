"""The Load Parallel FLUX node."""

from __future__ import annotations

import os

import folder_paths
from comfy_api.latest import io

from ..parallel_backend.plan import ParallelPlan
from .model.build import WEIGHT_DTYPES, load_model
from .parallel_plan import PlanType
from .runtime import CATEGORY, backend

FOLDER = "diffusion_models"


class LoadParallelFlux(io.ComfyNode):
    """A FLUX MODEL whose weights live in worker processes, one a device."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Load Diffusion Model's inputs, and a plan."""
        return io.Schema(
            node_id="LoadParallelFlux",
            display_name="Load Parallel FLUX",
            category=CATEGORY,
            description="Takes the place of Load Diffusion Model: the same MODEL, denoised on several GPUs. The weights "
            "are loaded when first sampled.",
            search_aliases=["multi gpu flux", "load flux", "unet loader", "load diffusion model"],
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=folder_paths.get_filename_list(FOLDER),
                    tooltip="A FLUX.1 dev or schnell file in models/diffusion_models.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    tooltip="The precision the weights are kept in; default does as ComfyUI's Load Diffusion Model.",
                ),
                PlanType.Input("plan", optional=True, tooltip="Which devices to use and how; without one, all GPUs."),
            ],
            outputs=[io.Model.Output(tooltip="Works with every sampler node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, unet_name: str, **_: object) -> str:
        """A file that was replaced is loaded again."""
        path = folder_paths.get_full_path(FOLDER, unet_name)
        if path is None:
            return ""
        status = os.stat(path)
        return f"{status.st_mtime_ns} {status.st_size}"

    @classmethod
    def execute(cls, unet_name: str, weight_dtype: str, plan: ParallelPlan | None = None) -> io.NodeOutput:
        """Check file and plan, and return the MODEL; no worker is started yet."""
        path = folder_paths.get_full_path_or_raise(FOLDER, unet_name)
        return io.NodeOutput(load_model(backend(), "flux", path, weight_dtype, plan or ParallelPlan()))

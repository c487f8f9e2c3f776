"""ComfyUI's nodes of the pack. They translate ComfyUI's types into requests to the workers, and the replies back."""

from __future__ import annotations

import logging

from comfy_api.latest import ComfyExtension, io

from ..parallel_backend.errors import Refused
from ..parallel_backend.host.workers.versions import check_torch
from .conditioning import LoadConditioning, SaveConditioning
from .load_checkpoint import LoadParallelCheckpoint
from .load_clip import LoadParallelCLIP
from .load_model import LoadParallelCogVideoX, LoadParallelDiffusionModel, LoadParallelFlux, LoadParallelPixArt
from .load_vae import LoadParallelVAE
from .parallel_plan import ParallelPlanNode
from .parallel_sampler import ParallelSampler
from .routes import add_routes
from .samplers import register_samplers
from .video_decode import CogVideoParallelDecode


class ParallelExtension(ComfyExtension):
    """The pack's nodes and HTTP routes."""

    async def on_load(self) -> None:
        """Add the routes, and log a warning if torch is too old. The nodes stay available, for workers on other machines."""
        add_routes()
        try:
            check_torch()
        except Refused as refusal:
            logging.getLogger(__name__).warning("ComfyUI-Parallel: %s", refusal)

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return all nodes, in the order of a graph. Also add the pack's samplers to ComfyUI's lists."""
        register_samplers()
        return [
            ParallelPlanNode,
            LoadParallelDiffusionModel,
            LoadParallelCheckpoint,
            LoadParallelFlux,
            LoadParallelCogVideoX,
            LoadParallelPixArt,
            LoadParallelVAE,
            LoadParallelCLIP,
            ParallelSampler,
            CogVideoParallelDecode,
            LoadConditioning,
            SaveConditioning,
        ]

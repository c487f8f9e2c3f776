"""What the graph sees: each node translates ComfyUI's types to requests and back."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .conditioning import LoadConditioning, SaveConditioning
from .load_flux import LoadParallelFlux
from .load_vae import LoadParallelVAE
from .parallel_plan import ParallelPlanNode
from .parallel_sampler import ParallelSampler
from .video_decode import CogVideoParallelDecode


class ParallelExtension(ComfyExtension):
    """The pack's nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """All nodes, in the order of a graph."""
        return [
            ParallelPlanNode,
            LoadParallelFlux,
            LoadParallelVAE,
            ParallelSampler,
            CogVideoParallelDecode,
            LoadConditioning,
            SaveConditioning,
        ]

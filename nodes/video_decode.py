"""The CogVideoX Parallel Decode node."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..parallel_backend.errors import Refused
from .runtime import CATEGORY
from .vae import ParallelVAE


class CogVideoParallelDecode(io.ComfyNode):
    """A node that decodes a video latent on all workers, exactly unless the user asks for tiles."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare VAE Decode's inputs, and the size of tiles, for a decode that exceeds the memory."""
        return io.Schema(
            node_id="CogVideoParallelDecode",
            display_name="CogVideoX Parallel Decode",
            category=CATEGORY,
            description="Decodes a video latent on all workers of the VAE. Unlike VAE Decode it never falls back to "
            "tiles, which are approximate, unless they are asked for.",
            search_aliases=["video decode", "vae decode", "multi gpu decode", "cogvideo"],
            inputs=[
                io.Latent.Input("samples", tooltip="A video latent, from CogVideoX or another model."),
                io.Vae.Input("vae", tooltip="A video VAE from Load Parallel VAE."),
                io.Int.Input(
                    "approximate_tiles",
                    optional=True,
                    default=0,
                    min=0,
                    max=4096,
                    step=32,
                    advanced=True,
                    tooltip="0: none, the decode is exact. Otherwise the side in pixels of tiles that are decoded one after "
                    "another and blended, which needs less memory, but is approximate and can show seams.",
                ),
            ],
            outputs=[io.Image.Output(display_name="frames", tooltip="The frames in order, for Create Video.")],
        )

    @classmethod
    def execute(cls, samples: dict[str, Any], vae: Any, approximate_tiles: int = 0) -> io.NodeOutput:
        """Return the frames. The frames of several videos follow one another."""
        if not isinstance(vae, ParallelVAE):
            raise Refused(
                "CogVideoX Parallel Decode takes a VAE from Load Parallel VAE: use that loader, or VAE Decode."
            )
        if vae.remote.dims != 5:
            raise Refused(
                f"CogVideoX Parallel Decode was given {vae.remote.kind} and decodes videos: choose a video VAE, "
                "or use VAE Decode."
            )
        latent = samples["samples"]
        frames = vae.decode_in_tiles(latent, approximate_tiles) if approximate_tiles else vae.decode_whole(latent)
        return io.NodeOutput(frames.flatten(0, 1))

"""Networks next to the model's blocks that are refused."""

from __future__ import annotations

from typing import Any

from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.refusals.kinds import Refusals, exactly
from tests.support.graphs.comfyui import graph_of, spread
from tests.support.graphs.flux import Graph, insert_after_model, node
from tests.support.tiny.comfyui import save_unread
from tests.support.tiny.controlnet import save_wan_vae
from tests.support.tiny.models import draw

TEXT = {"wide_qwen": 3584, "wide_z_image": 64}
APPLY = {"wide_qwen": "QwenImageDiffsynthControlnet", "wide_z_image": "ZImageFunControlnet"}
NETWORK = {"wide_qwen": "PackNetwork", "wide_z_image": "PackZImageNetwork"}


def networks(server: ComfyUI) -> Refusals:
    """Yield graphs with model patches. Files of the real width have only headers, by which ComfyUI recognises the models."""
    save_wan_vae(server.base_dir / "models" / "vae" / "refused-hint.safetensors")
    for name, width in TEXT.items():
        save_unread(server.base_dir / "models" / "diffusion_models", name)
        save_file({"cond": draw(1, 7, width, seed=7)}, server.input_dir / f"{name}-unread.safetensors")
    fit = ": choose a patch that was made for this model."
    yield with_network("wide_qwen", blocks=0), exactly(f"the model patch has 0 blocks and the model 1{fit}")
    yield (
        with_network("wide_z_image", blocks=2),
        exactly(f"the model patch changes block 15 and the model has only 1{fit}"),
    )
    yield (
        with_network("wide_z_image", blocks=1, patches=2),
        "Apply Z-Image Fun ControlNet cannot be used with pipefusion 1 and patches 2, because its blocks need the whole pict",
    )


def with_network(name: str, *, blocks: int, **plan: Any) -> Graph:
    """Return a graph of a model with a network of `blocks` blocks."""
    graph = graph_of("wan") | {
        "latent": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "image": node("EmptyImage", width=64, height=64, batch_size=1, color=0),
        "vae": node("VAELoader", vae_name="refused-hint.safetensors"),
        "network": node(NETWORK[name], blocks=blocks),
    }
    graph["model"]["inputs"]["unet_name"] = f"{name}-unread.safetensors"
    for side in ("positive", "negative"):
        graph[side]["inputs"]["conditioning"] = f"{name}-unread.safetensors"
    given = {"model_patch": ["network", 0], "vae": ["vae", 0], "image": ["image", 0], "strength": 1.0}
    return spread(insert_after_model(graph, APPLY[name], **given), "cpu:1", **plan)

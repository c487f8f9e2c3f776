"""LoRA files for ComfyUI's own models, and graphs with them."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from tests.support.graphs.flux import Graph, insert_after_model
from tests.support.tiny.models import draw

LORA: dict[str, tuple[str, ...]] = {
    "flux2": (
        "transformer.transformer_blocks.0.attn.to_k",
        "diffusion_model.double_blocks.0.txt_attn.qkv",
        "diffusion_model.double_blocks.0.img_mlp.2",
        "diffusion_model.single_blocks.0.linear1_qkv",
        "diffusion_model.single_blocks.1.linear2",
        "diffusion_model.double_stream_modulation_img.lin",
        "diffusion_model.final_layer.linear",
    ),
    "wan": (
        "diffusion_model.blocks.0.self_attn.q",
        "diffusion_model.blocks.1.cross_attn.v",
        "diffusion_model.blocks.2.ffn.2",
        "diffusion_model.time_projection.1",
        "diffusion_model.head.head",
    ),
}
"""Layers by trainers' names: parts of fused layers, whole fused layers, plain layers, and layers outside of the blocks."""
PARTS = {
    "transformer.transformer_blocks.0.attn.to_k": "double_blocks.0.img_attn.qkv",
    "diffusion_model.single_blocks.0.linear1_qkv": "single_blocks.0.linear1",
}
"""Fused layers that the parts in `LORA` belong to. A part has the same inputs; its outputs are three heads wide."""
HIDDEN = 384


def save_lora(path: Path, layers: tuple[str, ...], tensors: dict[str, Tensor]) -> None:
    """Write a LoRA of rank 4, and a change of Wan's patch embedding (a convolution)."""
    made: dict[str, Tensor] = {}
    for number, layer in enumerate(layers):
        rows, columns = tensors[f"{PARTS.get(layer, layer.removeprefix('diffusion_model.'))}.weight"].shape
        if layer in PARTS:
            rows = 3 * HIDDEN if layer.endswith("qkv") else HIDDEN
        made[f"{layer}.lora_B.weight"] = draw(rows, 4, seed=2 * number)
        made[f"{layer}.lora_A.weight"] = draw(4, columns, seed=2 * number + 1) * 0.5 / columns**0.5
    embedding = tensors.get("patch_embedding.weight")
    if embedding is not None:
        made["diffusion_model.patch_embedding.diff"] = 0.1 * draw(*embedding.shape, seed=50)
    save_file(made, path)


def with_lora(graph: Graph, name: str, strength: float) -> Graph:
    """Return the graph with the family's LoRA."""
    return insert_after_model(
        graph, "LoraLoaderModelOnly", lora_name=f"{name}-lora.safetensors", strength_model=strength
    )

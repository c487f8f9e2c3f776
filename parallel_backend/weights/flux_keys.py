"""FLUX key map: Black Forest Labs' tensor names to the parameters of diffusers' FluxTransformer2DModel.

BFL fuses q, k, v (and a single block's MLP input) into one tensor by rows; its last modulation is (shift, scale)
where diffusers has (scale, shift).
"""

from __future__ import annotations

from collections.abc import Iterator

from .keymap import KeyMap, Piece

HEAD_DIM = 128
MLP_RATIO = 4
TIME_FEATURES = 256
PATCH_AREA = 4

Rows = tuple[tuple[int, int], ...]
DIFFUSERS_NAMES = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "final_layer.linear": "proj_out",
    "double_blocks": "transformer_blocks",
    "single_blocks": "single_transformer_blocks",
}
"""What tells a model's shape, by both names."""

Linear = tuple[str, str, Rows, int]
"""A module's name, its tensors' name in the file, the rows it takes, and its input width."""


def flux_keys(
    *,
    hidden: int,
    double_blocks: int,
    single_blocks: int,
    channels: int,
    out_channels: int,
    text_width: int,
    pooled_width: int,
    guidance: bool,
) -> KeyMap:
    """The key map of a FLUX model of the given shape."""
    linears = [
        *_ends(hidden, channels, out_channels, text_width, pooled_width, guidance),
        *(linear for index in range(double_blocks) for linear in _double(index, hidden)),
        *(linear for index in range(single_blocks) for linear in _single(index, hidden)),
    ]
    names: dict[str, tuple[Piece, ...]] = {}
    for module, source, rows, width in linears:
        names[f"{module}.weight"] = tuple(Piece(f"{source}.weight", *run, (width,)) for run in rows)
        names[f"{module}.bias"] = tuple(Piece(f"{source}.bias", *run, ()) for run in rows)
    for norm, source in _norms(double_blocks, single_blocks):
        names[f"{norm}.weight"] = (Piece(f"{source}.scale", 0, HEAD_DIM, ()),)
    return names


def _ends(
    h: int, channels: int, out_channels: int, text_width: int, pooled_width: int, guidance: bool
) -> Iterator[Linear]:
    yield "x_embedder", "img_in", ((0, h),), channels * PATCH_AREA
    yield "context_embedder", "txt_in", ((0, h),), text_width
    embedders = [("timestep_embedder", "time_in", TIME_FEATURES), ("text_embedder", "vector_in", pooled_width)]
    if guidance:
        embedders.append(("guidance_embedder", "guidance_in", TIME_FEATURES))
    for name, source, width in embedders:
        yield f"time_text_embed.{name}.linear_1", f"{source}.in_layer", ((0, h),), width
        yield f"time_text_embed.{name}.linear_2", f"{source}.out_layer", ((0, h),), h
    yield "norm_out.linear", "final_layer.adaLN_modulation.1", ((h, 2 * h), (0, h)), h
    yield "proj_out", "final_layer.linear", ((0, out_channels * PATCH_AREA),), h


def _double(index: int, h: int) -> Iterator[Linear]:
    block, source, mlp = f"transformer_blocks.{index}", f"double_blocks.{index}", MLP_RATIO * h
    for stream, norm, qkv, proj, ff in (
        ("img", "norm1", ("to_q", "to_k", "to_v"), "to_out.0", "ff"),
        ("txt", "norm1_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "ff_context"),
    ):
        yield f"{block}.{norm}.linear", f"{source}.{stream}_mod.lin", ((0, 6 * h),), h
        for part, name in enumerate(qkv):
            yield f"{block}.attn.{name}", f"{source}.{stream}_attn.qkv", ((part * h, (part + 1) * h),), h
        yield f"{block}.attn.{proj}", f"{source}.{stream}_attn.proj", ((0, h),), h
        yield f"{block}.{ff}.net.0.proj", f"{source}.{stream}_mlp.0", ((0, mlp),), h
        yield f"{block}.{ff}.net.2", f"{source}.{stream}_mlp.2", ((0, h),), mlp


def _single(index: int, h: int) -> Iterator[Linear]:
    block, source, mlp = f"single_transformer_blocks.{index}", f"single_blocks.{index}", MLP_RATIO * h
    yield f"{block}.norm.linear", f"{source}.modulation.lin", ((0, 3 * h),), h
    for part, name in enumerate(("to_q", "to_k", "to_v")):
        yield f"{block}.attn.{name}", f"{source}.linear1", ((part * h, (part + 1) * h),), h
    yield f"{block}.proj_mlp", f"{source}.linear1", ((3 * h, 3 * h + mlp),), h
    yield f"{block}.proj_out", f"{source}.linear2", ((0, h),), h + mlp


def _norms(double_blocks: int, single_blocks: int) -> Iterator[tuple[str, str]]:
    for index in range(double_blocks):
        for stream, parts in (("img", ("norm_q", "norm_k")), ("txt", ("norm_added_q", "norm_added_k"))):
            for part, source in zip(parts, ("query_norm", "key_norm"), strict=True):
                yield f"transformer_blocks.{index}.attn.{part}", f"double_blocks.{index}.{stream}_attn.norm.{source}"
    for index in range(single_blocks):
        for part, source in (("norm_q", "query_norm"), ("norm_k", "key_norm")):
            yield f"single_transformer_blocks.{index}.attn.{part}", f"single_blocks.{index}.norm.{source}"

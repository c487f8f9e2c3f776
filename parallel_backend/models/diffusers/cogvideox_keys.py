"""The CogVideoX key map, from ComfyUI's tensor names to the parameters of diffusers' CogVideoXTransformer3DModel.

Each tensor is exactly one parameter.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...weights.files.keymap import KeyMap, Piece

MLP_RATIO = 4
PATCH = 2

Shape = tuple[int, ...]


def cogvideox_keys(
    *,
    hidden: int,
    head_dim: int,
    layers: int,
    in_channels: int,
    out_channels: int,
    patch_frames: int,
    conv: bool,
    text_width: int,
    time_width: int,
    offset: bool,
    learned_positions: int,
) -> KeyMap:
    """Return the key map of a CogVideoX model of the given shape.

    Args:
        patch_frames: the number of latent frames in a token.
        conv: True if patches are embedded by a convolution (1.0) instead of a linear layer.
        offset: True if the model embeds the image's offset (1.5 image to video).
        learned_positions: the number of tokens with a learned position, or 0.
    """
    patch = PATCH**2 * patch_frames
    embed = (in_channels, PATCH, PATCH) if conv else (in_channels * patch,)
    shapes: dict[str, Shape] = {
        **_linear("patch_embed.proj", hidden, embed),
        **_linear("patch_embed.text_proj", hidden, (text_width,)),
        **_linear("time_embedding.linear_1", time_width, (hidden,)),
        **_linear("time_embedding.linear_2", time_width, (time_width,)),
        **_norm("norm_final", hidden),
        **_linear("norm_out.linear", 2 * hidden, (time_width,)),
        **_norm("norm_out.norm", hidden),
        **_linear("proj_out", out_channels * patch, (hidden,)),
    }
    if offset:
        shapes |= _linear("ofs_embedding.linear_1", time_width, (time_width,))
        shapes |= _linear("ofs_embedding.linear_2", time_width, (time_width,))
    if learned_positions:
        shapes["patch_embed.pos_embedding"] = (1, learned_positions, hidden)
    for index in range(layers):
        for name, shape in _block(hidden, head_dim, time_width):
            shapes[f"transformer_blocks.{index}.{name}"] = shape
    return {name: Piece(comfy_name(name), 0, shape[0], shape[1:]) for name, shape in shapes.items()}


def comfy_name(name: str) -> str:
    """Return ComfyUI's name of a parameter. Names of ComfyUI stay as they are."""
    for theirs, ours in _RENAMED:
        name = name.replace(theirs, ours)
    return name


_RENAMED = (
    ("transformer_blocks.", "blocks."),
    (".attn1.to_q.", ".q."),
    (".attn1.to_k.", ".k."),
    (".attn1.to_v.", ".v."),
    (".attn1.to_out.0.", ".attn_out."),
    (".attn1.norm_", ".norm_"),
    (".ff.net.0.proj.", ".ff_proj."),
    (".ff.net.2.", ".ff_out."),
    ("_embedding.linear_", "_embedding_linear_"),
)


def _block(hidden: int, head_dim: int, time_width: int) -> Iterator[tuple[str, Shape]]:
    for norm in ("norm1", "norm2"):
        yield from _linear(f"{norm}.linear", 6 * hidden, (time_width,)).items()
        yield from _norm(f"{norm}.norm", hidden).items()
    for part in ("to_q", "to_k", "to_v", "to_out.0"):
        yield from _linear(f"attn1.{part}", hidden, (hidden,)).items()
    for part in ("norm_q", "norm_k"):
        yield from _norm(f"attn1.{part}", head_dim).items()
    yield from _linear("ff.net.0.proj", MLP_RATIO * hidden, (hidden,)).items()
    yield from _linear("ff.net.2", hidden, (MLP_RATIO * hidden,)).items()


def _linear(name: str, rows: int, row_shape: Shape) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, *row_shape), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

"""The PixArt key map, from the original tensor names to the parameters of diffusers' PixArtTransformer2DModel.

The original fuses q, k and v of the self-attention, and k and v of the cross-attention, into one tensor by rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...weights.files.keymap import KeyMap, Piece

MLP_RATIO = 4
PATCH = 2
TIME_FEATURES = 256

Source = tuple[str, int, int]
"""The original tensor's name without `.weight`, the first row that is taken from it, and the row after the last."""


def pixart_keys(
    *,
    hidden: int,
    layers: int,
    channels: int,
    out_channels: int,
    text_width: int,
    micro_conditions: bool,
) -> KeyMap:
    """Return the key map of a PixArt model of the given shape.

    Args:
        micro_conditions: True if the model embeds the picture's size and aspect ratio.
    """
    linears = [*_ends(hidden, channels, out_channels, text_width, micro_conditions)]
    tables = [("scale_shift_table", "final_layer.scale_shift_table", 2)]
    for index in range(layers):
        block, source = f"transformer_blocks.{index}", f"blocks.{index}"
        linears += [
            (f"{block}.{name}", (f"{source}.{theirs[0]}", *theirs[1:]), row) for name, theirs, row in _block(hidden)
        ]
        tables.append((f"{block}.scale_shift_table", f"{source}.scale_shift_table", 6))
    names: dict[str, Piece] = {}
    for module, (source, start, stop), row_shape in linears:
        names[f"{module}.weight"] = Piece(f"{source}.weight", start, stop, row_shape)
        names[f"{module}.bias"] = Piece(f"{source}.bias", start, stop, ())
    for name, source, rows in tables:
        names[name] = Piece(source, 0, rows, (hidden,))
    return names


def _ends(
    h: int, channels: int, out_channels: int, text_width: int, micro_conditions: bool
) -> Iterator[tuple[str, Source, tuple[int, ...]]]:
    yield "pos_embed.proj", ("x_embedder.proj", 0, h), (channels, PATCH, PATCH)
    yield "caption_projection.linear_1", ("y_embedder.y_proj.fc1", 0, h), (text_width,)
    yield "caption_projection.linear_2", ("y_embedder.y_proj.fc2", 0, h), (h,)
    embedders = [("timestep_embedder", "t_embedder", h)]
    if micro_conditions:
        embedders += [
            ("resolution_embedder", "csize_embedder", h // 3),
            ("aspect_ratio_embedder", "ar_embedder", h // 3),
        ]
    for name, source, width in embedders:
        yield f"adaln_single.emb.{name}.linear_1", (f"{source}.mlp.0", 0, width), (TIME_FEATURES,)
        yield f"adaln_single.emb.{name}.linear_2", (f"{source}.mlp.2", 0, width), (width,)
    yield "adaln_single.linear", ("t_block.1", 0, 6 * h), (h,)
    yield "proj_out", ("final_layer.linear", 0, out_channels * PATCH**2), (h,)


def _block(h: int) -> Iterator[tuple[str, Source, tuple[int, ...]]]:
    for part, name in enumerate(("to_q", "to_k", "to_v")):
        yield f"attn1.{name}", ("attn.qkv", part * h, (part + 1) * h), (h,)
    yield "attn1.to_out.0", ("attn.proj", 0, h), (h,)
    yield "attn2.to_q", ("cross_attn.q_linear", 0, h), (h,)
    for part, name in enumerate(("to_k", "to_v")):
        yield f"attn2.{name}", ("cross_attn.kv_linear", part * h, (part + 1) * h), (h,)
    yield "attn2.to_out.0", ("cross_attn.proj", 0, h), (h,)
    yield "ff.net.0.proj", ("mlp.fc1", 0, MLP_RATIO * h), (h,)
    yield "ff.net.2", ("mlp.fc2", 0, h), (MLP_RATIO * h,)

"""The sizes of ComfyUI's models by which plans are chosen (ModelShape), and the number of tokens of reference latents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ...declaration import Declaration, DistributedAttention, HeadParallelAttention, PrefixedAttention
from ...plan import ModelShape
from ...plan.predict.kernel_counts import of_a_block, passes_of_a_block
from ...plan.predict.profiles import copies_of
from ..sequence_parallel.blocks import Block, attentions_of
from ..sequence_parallel.picture import Picture, as_patch_size

MODULATION = ("mod", "adaLN", "adaln", "norm")
"""Parts of the names of layers that run once in a call instead of once for each token."""

REFERENCES = frozenset(
    {
        "ref_latents",
        "ref_latent",
        "reference_latent",
        "context_latents",
        "vace_context",
        "cond_video_latents",
        "time_dim_concat",
    }
)
"""Conditioning whose latents become tokens."""


def unsharded_shape(kind: str, parameters: int, channels: int) -> ModelShape:
    """Return the shape of a model that runs unsharded: one block that holds all `parameters`."""
    return ModelShape(
        name=kind,
        hidden=1,
        heads=1,
        double_blocks=0,
        single_blocks=1,
        double_weights=0,
        single_weights=parameters,
        other_weights=0,
        token_weights=0,
        channels=channels,
        joint_text=False,
        attentions=0.0,
        unsharded=True,
    )


def plan_shape(
    kind: str, module: nn.Module, declaration: Declaration, blocks: Sequence[Block], channels: int, dims: int
) -> ModelShape:
    """Return the shape of a model with a declaration. If there are several groups, blocks of the first are double blocks."""
    heads, head_dim = declaration.attention_heads(module)
    units = blocks[-1].unit + 1
    first = declaration.groups[0]
    doubles = sum(block.group is first for block in blocks)
    if declaration.units or doubles == len(blocks):
        doubles = 0
    sizes = [sum(p.numel() for p in block.module.parameters()) for block in blocks]
    inside = sum(sizes)
    double = sum(sizes[:doubles])
    operations = [block.group.kernels or of_a_block(type(block.module).__name__) for block in blocks]
    passes = sum(passes_of_a_block(type(block.module).__name__) for block in blocks)
    sharded = [attention for block in blocks for attention in _sharded_attentions(block)]
    kv_heads = max((attention.kv_heads or heads for attention in sharded), default=heads)
    double_operations = sum(operations[:doubles])
    volume = 1
    for step in as_patch_size(declaration.patch_size(module), dims):
        volume *= step
    return ModelShape(
        name=kind,
        hidden=heads * head_dim,
        heads=heads,
        double_blocks=doubles,
        single_blocks=units - doubles,
        double_weights=double // doubles if doubles else 0,
        single_weights=(inside - double) // (units - doubles),
        other_weights=sum(p.numel() for p in module.parameters()) - inside,
        token_weights=round(sum(map(_token_weights, blocks)) / units),
        channels=channels * volume,
        joint_text=declaration.joint_text,
        embeds_whole=True,
        copies=_copies(blocks, heads * head_dim),
        attentions=len(sharded) / units,
        whole_picture=declaration.whole_picture,
        double_operations=double_operations // doubles if doubles else 0,
        single_operations=(sum(operations) - double_operations) // (units - doubles),
        passes=round(passes / units, 1),
        kv_heads=0 if kv_heads == heads else kv_heads,
    )


def _token_layers(block: Block) -> dict[str, Tensor]:
    """Return the weights, `[out, in]`, of the layers that are applied to every token."""
    return {
        name: parameter
        for name, parameter in block.module.named_parameters()
        if parameter.ndim == 2 and not any(part in name for part in MODULATION)
    }


def _token_weights(block: Block) -> float:
    """Return the number of parameters that multiply one token. Text in the sequence has parameters of its own."""
    if block.group.active_weights:
        return block.group.active_weights * sum(parameter.numel() for parameter in block.module.parameters())
    kinds = {type(block.group.streams[name]) for name in block.group.returns}
    return sum(weight.numel() for weight in _token_layers(block).values()) / len(kinds)


def _copies(blocks: Sequence[Block], hidden: int) -> float:
    """Return `ModelShape.copies`: the declared number, or an estimate from the widest layers of any block."""
    if declared := max(block.group.activation_copies for block in blocks):
        return declared
    layers = {f"{block.path}.{name}": weight.shape for block in blocks for name, weight in _token_layers(block).items()}
    widths_in, widths_out = {width for _, width in layers.values()}, {width for width, _ in layers.values()}
    siblings = Counter((name.rsplit(".", 2)[0], width) for name, (width, _) in layers.items())
    pairs = {width for (_, width), count in siblings.items() if count > 1} | {width // 2 for width in widths_out}
    gated = max((width for width in pairs & widths_in if width > hidden), default=0)
    return copies_of(hidden, max(widths_in), max(widths_out), gated)


def _sharded_attentions(block: Block) -> list[DistributedAttention | HeadParallelAttention | PrefixedAttention]:
    attentions = attentions_of(block.group, block.module)
    return [
        attention
        for attention in attentions
        if isinstance(attention, DistributedAttention | HeadParallelAttention | PrefixedAttention)
    ]


def reference_tokens(
    conditioning: Mapping[str, Tensor], patch_size: tuple[int, ...], more: frozenset[str] = frozenset()
) -> int:
    """Return the number of tokens of one batch item's references and of `more` latents.

    A reference of a video may be a single frame without a dimension of frames.
    """
    names, dims = REFERENCES | more, len(patch_size)
    shapes = (tuple(tensor.shape) for name, tensor in conditioning.items() if names.intersection(name.split(".")))
    latents = ((*shape[:2], 1, *shape[2:]) if len(shape) == 4 and dims == 3 else shape for shape in shapes)
    return sum(Picture(shape, patch_size).tokens for shape in latents if len(shape) == 2 + dims)

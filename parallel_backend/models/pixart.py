"""PixArt-alpha and PixArt-Sigma over diffusers' PixArtTransformer2DModel, numerically as diffusers' PixArtAlphaPipeline.

Attention among the tokens is of the picture alone. Text is attended to by cross-attention, which every rank computes for
its own tokens; a mask, where the conditioning has one, hides padding. What diffusers does not take is as in ComfyUI:
without a mask all of the text counts, and a latent of odd height or width is padded circularly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..diffusion import Value
from ..errors import Refused
from ..layout import TokenLayout, length
from ..plan import ModelShape
from ..weights.checkpoint import Checkpoint
from ..weights.keymap import KeyMap, under_map_names
from ..weights.layers import use_cast_linears
from ..weights.pixart_keys import PATCH, TIME_FEATURES, pixart_keys
from ..weights.scaled import resolve_scales
from .family import Activations, Block, Conditioning, Patch, Qkv, Stage
from .functions import conv_as_linear, sine_positions, sinusoids
from .inspection import check_tensors, count_blocks, find_prefix, sizes
from .picture import grid, patchify, row_patches

PREFIXES = ("", "model.diffusion_model.")
ORIGINAL_NAMES = {
    "mark": "t_block.1.weight",
    "image": "x_embedder.proj.weight",
    "text": "y_embedder.y_proj.fc1.weight",
    "output": "final_layer.linear.weight",
    "size": "csize_embedder.mlp.0.weight",
    "blocks": "blocks",
}
DIFFUSERS_NAMES = {
    "mark": "caption_projection.linear_1.weight",
    "image": "pos_embed.proj.weight",
    "text": "caption_projection.linear_1.weight",
    "output": "proj_out.weight",
    "size": "adaln_single.emb.resolution_embedder.linear_1.weight",
    "blocks": "transformer_blocks",
}
"""What a file's tensors are called from which the shape of the model is read."""

HEADS = 16
"""All published models have as many; a file does not tell."""

GRID = 32.0
"""Rows and columns of a picture of any size are spaced as if there were so many."""

HIDDEN_TEXT = -10000.0
"""Added to the attention scores of text that a mask hides, as in diffusers."""


@dataclass(frozen=True)
class PixArtConfig:
    """The shape of a PixArt model, read off its tensors."""

    hidden: int
    layers: int
    channels: int
    out_channels: int
    text_width: int
    micro_conditions: bool

    @property
    def head_dim(self) -> int:
        """Features of an attention head."""
        return self.hidden // HEADS


@dataclass(frozen=True)
class Told:
    """What all blocks of a call are told.

    Attributes:
        modulation: `[batch, 6, features]`, to which each block adds its own.
        time: `[batch, features]`, for the output.
        text: `[batch, text tokens, features]`.
        bias: added to the scores of the cross-attention, `[batch, 1, 1, text tokens]`, if there is a mask.
    """

    modulation: Tensor
    time: Tensor
    text: Tensor
    bias: Tensor | None


class PixArtFamily:
    """Reads PixArt files with the original or diffusers' tensor names and builds the model."""

    takes: frozenset[str] | None = frozenset({"context", "attention_mask", "c_size", "c_ar"})

    def inspect(self, checkpoint: Checkpoint) -> tuple[Checkpoint, PixArtConfig]:
        """The model's own tensors and its configuration. Raises Refused where the file is no PixArt model."""
        name = checkpoint.path.name
        prefix = find_prefix(checkpoint, PREFIXES, (ORIGINAL_NAMES["mark"], DIFFUSERS_NAMES["mark"]))
        if prefix is None:
            raise Refused(f"{name} has no PixArt tensors: choose a PixArt-alpha or PixArt-Sigma file.")
        part = resolve_scales(checkpoint.select(prefix, str), prefix)
        if any(".attn.sr." in tensor for tensor in part.entries):
            raise Refused(f"{name} compresses its keys and values, which is not supported: choose another PixArt file.")
        original = ORIGINAL_NAMES["mark"] in part.entries
        try:
            config = _read_config(part, ORIGINAL_NAMES if original else DIFFUSERS_NAMES)
        except KeyError as missing:
            raise Refused(f"{name} lacks the PixArt tensor {missing}: choose a complete PixArt file.") from None
        if not original:
            part = under_map_names(part, self.keys(config))
        check_tensors(part, self.keys(config), "PixArt", config.hidden)
        return part, config

    def shape(self, config: PixArtConfig) -> ModelShape:
        """Parameters by the sizes of diffusers' modules, biases left out."""
        square, patch = config.hidden**2, PATCH**2
        ends = patch * (config.channels + config.out_channels) + config.text_width + TIME_FEATURES
        return ModelShape(
            name="pixart",
            hidden=config.hidden,
            heads=HEADS,
            double_blocks=0,
            single_blocks=config.layers,
            double_weights=0,
            single_weights=16 * square,
            other_weights=8 * square + config.hidden * ends,
            token_weights=14 * square,  # the cross-attention's keys and values are made of the text alone
            channels=config.channels * patch,
            text=120,
            joint_text=False,
            guided=True,
        )

    def token_rows(self, config: PixArtConfig, latent_shape: Sequence[int]) -> int:
        """Patches are whole rows of tokens."""
        return grid(latent_shape, PATCH)[0]

    def image_tokens(self, config: PixArtConfig, latent_shape: Sequence[int]) -> int:
        """One for each 2 x 2 of the latent."""
        return math.prod(grid(latent_shape, PATCH))

    def two_of_each(self, config: PixArtConfig) -> tuple[PixArtConfig, tuple[int, ...]]:
        """There is one kind of block."""
        return replace(config, layers=2), (config.layers,)

    def check(
        self, config: PixArtConfig, latent: Tensor, conditioning: Conditioning, values: Mapping[str, Value]
    ) -> None:
        """Refuse inputs of the wrong size, in one sentence with the numbers."""
        shape = list(latent.shape)
        if latent.ndim != 4 or latent.shape[1] != config.channels:
            raise Refused(
                f"the latent has the shape {shape} and PixArt takes [batch, {config.channels}, height, width]: "
                "use EmptyLatentImage, or encode with the model's VAE."
            )
        if min(shape) < 1:
            raise Refused(
                f"the latent has the shape {shape}, which is empty: use a batch of at least 1 and at least 16 x 16 pixels."
            )
        text = conditioning["context"]
        if text.ndim != 3 or text.shape[1] == 0 or text.shape[2] != config.text_width:
            raise Refused(
                f"the conditioning's text has the shape {list(text.shape)} and this model takes "
                f"[batch, tokens, {config.text_width}]: use CLIPLoader with the type pixart and t5xxl."
            )
        mask = conditioning.get("attention_mask")
        if mask is not None and mask.shape[-1] != text.shape[1]:
            raise Refused(
                f"the conditioning's attention_mask is for {mask.shape[-1]} text tokens and there are {text.shape[1]}: "
                "save text and mask together."
            )

    def keys(self, config: PixArtConfig) -> KeyMap:
        """Which rows of which tensors make each parameter."""
        return pixart_keys(**asdict(config))

    def comfyui_keys(self, config: PixArtConfig) -> KeyMap:
        """ComfyUI's names are those of the key map."""
        return self.keys(config)

    def beside_tokens(self, config: PixArtConfig, conditioning: Conditioning) -> int:
        """Text."""
        return conditioning["context"].shape[1]

    def exact(self, config: PixArtConfig) -> frozenset[str]:
        """None: all parameters have the type that is chosen."""
        return frozenset()

    def control_blocks(self, config: PixArtConfig) -> Mapping[str, range]:
        """No ControlNet is supported."""
        return {}

    def build(self, config: PixArtConfig, stage: Stage) -> PixArtModel:
        """One stage of the model on the meta device."""
        return PixArtModel(config, stage)


def _read_config(part: Checkpoint, names: Mapping[str, str]) -> PixArtConfig:
    hidden, channels = sizes(part, names["image"], 4)[:2]
    return PixArtConfig(
        hidden=hidden,
        layers=count_blocks(part, names["blocks"]),
        channels=channels,
        out_channels=sizes(part, names["output"])[0] // PATCH**2,
        text_width=sizes(part, names["text"])[1],
        micro_conditions=names["size"] in part.entries,
    )


class PixArtModel:
    """PixArtTransformer2DModel's modules, driven token run by token run."""

    def __init__(self, config: PixArtConfig, stage: Stage) -> None:
        from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel  # 5 s: workers only

        with torch.device("meta"):
            module = PixArtTransformer2DModel(
                num_attention_heads=HEADS,
                attention_head_dim=config.head_dim,
                in_channels=config.channels,
                out_channels=config.out_channels,
                num_layers=config.layers,
                cross_attention_dim=config.hidden,
                caption_channels=config.text_width,
                use_additional_conditions=config.micro_conditions,
            )
        self.block_modules: Sequence[nn.Module] = _keep_stage(module, stage)
        use_cast_linears(module)
        self.module: nn.Module = module.eval().requires_grad_(False)
        self.blocks: Sequence[Block] = [PixArtBlock(block, config.head_dim) for block in self.block_modules]
        self.heads = HEADS
        self.head_dim = config.head_dim
        self.features = config.hidden
        self._config = config
        self._pixart = module

    def patches(self, latent_shape: Sequence[int], count: int) -> tuple[Patch, ...]:
        """Whole rows of tokens each; the last patch of an odd latent has a partial row."""
        return row_patches(latent_shape, PATCH, count)

    def text_tokens(self, conditioning: Conditioning) -> int:
        """Text is no part of the sequence."""
        return 0

    def embed(self, latent: Tensor, conditioning: Conditioning, layout: TokenLayout, rank: int) -> Tensor:
        """The tokens of one sequence rank, with their positions."""
        patches, places = patchify(latent, PATCH), self._places(latent.shape, latent.device)
        runs = layout.image(rank)
        image = conv_as_linear(self._pixart.pos_embed.proj, torch.cat([patches[:, run] for run in runs], dim=1))
        return (image + torch.cat([places[run] for run in runs])).to(image.dtype)

    def modulation(self, timestep: Tensor, conditioning: Conditioning, dtype: torch.dtype) -> Told:
        """The timestep, the picture's size where the model takes it, and the text with its mask."""
        pixart, adaln = self._pixart, self._pixart.adaln_single
        time = adaln.emb.timestep_embedder(sinusoids(timestep, TIME_FEATURES).to(dtype))
        if self._config.micro_conditions:
            sizes = sinusoids(conditioning["c_size"], TIME_FEATURES).to(dtype)
            ratio = sinusoids(conditioning["c_ar"], TIME_FEATURES).to(dtype)
            embedded = (
                adaln.emb.resolution_embedder(sizes).flatten(1),
                adaln.emb.aspect_ratio_embedder(ratio).flatten(1),
            )
            time = time + torch.cat(embedded, dim=1)
        mask = conditioning.get("attention_mask")
        return Told(
            modulation=adaln.linear(F.silu(time)).unflatten(1, (6, -1)),
            time=time,
            text=pixart.caption_projection(conditioning["context"]),
            bias=None if mask is None else ((1 - mask.to(dtype)) * HIDDEN_TEXT)[:, None, None],
        )

    def positions(
        self,
        latent_shape: Sequence[int],
        layout: TokenLayout,
        rank: int,
        device: torch.device,
        conditioning: Conditioning,
    ) -> Tensor | None:
        """Positions are in the tokens already."""
        return None

    def unembed(self, state: Activations) -> Tensor:
        """The predicted noise of the local tokens, `[batch, local tokens, patch area * channels]`."""
        pixart, told = self._pixart, state.vec
        shift, scale = (pixart.scale_shift_table.to(told.time.dtype) + told.time[:, None]).chunk(2, dim=1)
        out = pixart.proj_out(_modulate(state.tokens, shift, scale)).unflatten(2, (PATCH**2, -1))
        return out[..., : self._config.channels].flatten(2)  # what the model says of the variance is not used

    def assemble(self, tokens: Tensor, latent_shape: Sequence[int], patch: Patch) -> Tensor:
        """Rows of tokens as rows of a latent, the padding cropped."""
        _, columns = grid(latent_shape, PATCH)
        squares = tokens.unflatten(1, (-1, columns)).unflatten(3, (PATCH, PATCH, -1)).permute(0, 5, 1, 3, 2, 4)
        return squares.flatten(4, 5).flatten(2, 3)[:, :, : length(patch.span), : latent_shape[3]]

    def _places(self, latent_shape: Sequence[int], device: torch.device) -> Tensor:
        """Absolute positions `[tokens, features]` in fp32: column, then row, on a grid of GRID x GRID."""
        rows, columns = grid(latent_shape, PATCH)
        row, column = (torch.arange(n, dtype=torch.float32, device=device) * (GRID / n) for n in (rows, columns))
        half = self._config.hidden // 2
        places = torch.cat(
            [sine_positions(column, half).repeat(rows, 1), sine_positions(row, half).repeat_interleave(columns, dim=0)],
            dim=1,
        )
        return places.float()


def _keep_stage(module: Any, stage: Stage) -> list[nn.Module]:
    """Drop what other stages hold; returns this stage's blocks. What blocks are told is made on every stage."""
    blocks = module.transformer_blocks
    for index in range(len(blocks)):
        if not stage.start <= index < stage.stop:
            blocks[index] = nn.Identity()
    if not stage.first:
        module.pos_embed = nn.Identity()
    if not stage.last:
        module.proj_out = nn.Identity()
        del module.scale_shift_table
    return list(blocks[stage.start : stage.stop])


class PixArtBlock:
    """Attention among the picture's tokens, cross-attention to the text, and an MLP."""

    def __init__(self, block: Any, head_dim: int) -> None:
        self._block = block
        self._head_dim = head_dim

    def before(self, state: Activations) -> tuple[Qkv, tuple[Tensor, ...]]:
        """q, k, v of all local tokens, and the modulation of what follows."""
        attn, told = self._block.attn1, state.vec
        table = self._block.scale_shift_table.to(told.modulation.dtype)
        shift, scale, *rest = (table + told.modulation).chunk(6, dim=1)
        x = _modulate(state.tokens, shift, scale)
        return (self._split(attn.to_q(x)), self._split(attn.to_k(x)), self._split(attn.to_v(x))), tuple(rest)

    def after(self, state: Activations, attention: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """The block's output tokens."""
        block, (gate, shift, scale, mlp_gate) = self._block, kept
        tokens = torch.addcmul(state.tokens, gate, block.attn1.to_out[0](attention.flatten(2)))
        tokens = tokens + self._attend_to_text(tokens, state.vec)
        return torch.addcmul(tokens, mlp_gate, block.ff(_modulate(tokens, shift, scale)))

    def _attend_to_text(self, tokens: Tensor, told: Told) -> Tensor:
        attn = self._block.attn2
        inputs = (attn.to_q(tokens), attn.to_k(told.text), attn.to_v(told.text))
        q, k, v = (self._split(x).transpose(1, 2) for x in inputs)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=told.bias)
        return attn.to_out[0](out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._head_dim))


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=1e-6), 1 + scale)

"""CogVideoX (2b, 5b, 1.5-5B; text and image to video) over diffusers' CogVideoXTransformer3DModel.

Numerically as diffusers' CogVideoXPipeline, positions too; ComfyUI's port has other ones for the 1.0 models. What
diffusers does not take is as in ComfyUI: a latent of odd height or width is padded circularly to the patch size.

Tokens are 2 x 2 of the latent in one frame (1.5: in two). Their order is by frame, row and column, or by row, frame and
column if there are more rows than frames, so that patches are runs of tokens and as many as can be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..diffusion import Value
from ..errors import Refused
from ..layout import TokenLayout, cut, length
from ..plan import ModelShape
from ..weights.checkpoint import Checkpoint
from ..weights.cogvideox_keys import PATCH, cogvideox_keys, comfy_name
from ..weights.keymap import KeyMap
from ..weights.layers import use_cast_linears
from ..weights.scaled import resolve_scales
from .family import Activations, Block, Conditioning, Patch, Qkv, Stage
from .functions import (
    conv_as_linear,
    layer_norm,
    pad_circularly,
    rotate,
    sine_positions,
    sinusoids,
)
from .inspection import check_tensors, count_blocks, find_prefix, sizes

PREFIXES = ("", "model.diffusion_model.")
CHANNELS = 16
LARGE_HEADS = 48
"""5b and 1.5 have as many heads, 2b has 30; files of the 1.0 models do not tell them apart otherwise (nor does ComfyUI)."""

SAMPLE = (60, 90)
"""Height and width of the latents that the 1.0 models were trained on, to which their rotary positions are fitted."""

LEARNED_FRAMES = 13
LEARNED_TEXT = 226
"""What the learned positions of 5b image to video are made for, at the size SAMPLE."""

SPATIAL_SCALE = 1.875
"""Absolute positions of 2b are spaced 1/1.875."""

SMALL_SHIFT, LARGE_SHIFT = 3.0, 1.0
"""Shift of the signal-to-noise ratio in the noise schedule (snr_shift_scale): 2b's and the others'."""


@dataclass(frozen=True)
class CogVideoXConfig:
    """The shape of a CogVideoX model, read off its tensors.

    `patch_frames` is how many latent frames a token covers: 2 in CogVideoX 1.5. `rotary` positions all have but 2b.
    """

    hidden: int
    head_dim: int
    layers: int
    in_channels: int
    patch_frames: int
    text_width: int
    time_width: int
    offset: bool
    learned_positions: int
    rotary: bool

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.hidden // self.head_dim

    @property
    def image_channels(self) -> int:
        """Channels of the image's latent, in models that turn an image into a video."""
        return self.in_channels - CHANNELS

    @property
    def snr_shift(self) -> float:
        """The noise schedule's snr_shift_scale."""
        return LARGE_SHIFT if self.rotary else SMALL_SHIFT


@dataclass(frozen=True)
class Grid:
    """How the tokens of a latent lie."""

    frames: int
    rows: int
    columns: int

    @classmethod
    def of(cls, config: CogVideoXConfig, shape: Sequence[int]) -> Grid:
        """For a latent `[batch, channels, frames, height, width]`."""
        return cls(shape[2] // config.patch_frames, math.ceil(shape[3] / PATCH), math.ceil(shape[4] / PATCH))

    @property
    def by_rows(self) -> bool:
        """Whether rows come before frames in the tokens' order."""
        return self.rows > self.frames

    def ordered(self, grid: Tensor) -> Tensor:
        """A grid `[..., frames, rows, columns, features]` as tokens `[..., tokens, features]`."""
        return (grid.transpose(-4, -3) if self.by_rows else grid).flatten(-4, -2)

    def coordinates(self, device: torch.device) -> Tensor:
        """Frame, row and column of each token, `[tokens, 3]`."""
        ranges = (torch.arange(n, device=device) for n in (self.frames, self.rows, self.columns))
        return self.ordered(torch.stack(torch.meshgrid(*ranges, indexing="ij"), dim=-1))


class CogVideoXFamily:
    """Reads CogVideoX files with ComfyUI's or diffusers' tensor names and builds the model."""

    takes: frozenset[str] | None = frozenset({"context", "concat", "ofs"})

    def inspect(self, checkpoint: Checkpoint) -> tuple[Checkpoint, CogVideoXConfig]:
        """The model's own tensors and its configuration. Raises Refused where the file is no CogVideoX model."""
        name = checkpoint.path.name
        marks = ("blocks.0.norm1.linear.weight", "transformer_blocks.0.norm1.linear.weight")
        prefix = find_prefix(checkpoint, PREFIXES, (*marks, "patch_embed.text_proj.weight"), least=2)
        if prefix is None:
            raise Refused(f"{name} has no CogVideoX tensors: choose a CogVideoX 2b, 5b or 1.5-5B file.")
        part = resolve_scales(checkpoint.select(prefix, comfy_name), prefix)
        try:
            config = _read_config(part)
        except KeyError as missing:
            raise Refused(f"{name} lacks the CogVideoX tensor {missing}: choose a complete CogVideoX file.") from None
        if config.in_channels not in (CHANNELS, 2 * CHANNELS):
            raise Refused(
                f"{name} takes {config.in_channels} latent channels (Fun and control models do); only CogVideoX models "
                f"with {CHANNELS} (text to video) or {2 * CHANNELS} (image to video) are supported."
            )
        check_tensors(part, self.keys(config), "CogVideoX", config.hidden)
        return part, config

    def shape(self, config: CogVideoXConfig) -> ModelShape:
        """Parameters by the sizes of diffusers' modules, biases and norms left out."""
        hidden, time, volume = config.hidden, config.time_width, PATCH**2 * config.patch_frames
        ends = volume * (config.in_channels + CHANNELS) + config.text_width + config.learned_positions
        return ModelShape(
            name="cogvideox",
            hidden=hidden,
            heads=config.heads,
            double_blocks=0,
            single_blocks=config.layers,
            double_weights=0,
            single_weights=12 * hidden**2 + 12 * time * hidden,
            other_weights=hidden * (ends + 3 * time) + time**2 * (1 + 2 * config.offset),
            token_weights=12 * hidden**2,
            channels=CHANNELS * volume,
            latent_frames=config.patch_frames,
            text=LEARNED_TEXT,
            guided=True,
        )

    def token_rows(self, config: CogVideoXConfig, latent_shape: Sequence[int]) -> int:
        """Patches are whole rows, or whole frames, of tokens."""
        grid = Grid.of(config, latent_shape)
        return max(grid.rows, grid.frames)

    def image_tokens(self, config: CogVideoXConfig, latent_shape: Sequence[int]) -> int:
        """One for each 2 x 2 of the latent in as many frames as a token covers."""
        grid = Grid.of(config, latent_shape)
        return grid.frames * grid.rows * grid.columns

    def two_of_each(self, config: CogVideoXConfig) -> tuple[CogVideoXConfig, tuple[int, ...]]:
        """There is one kind of block."""
        return replace(config, layers=2), (config.layers,)

    def check(
        self, config: CogVideoXConfig, latent: Tensor, conditioning: Conditioning, values: Mapping[str, Value]
    ) -> None:
        """Refuse inputs of the wrong size, and a missing image, in one sentence with the numbers."""
        shape = list(latent.shape)
        if latent.ndim != 5 or latent.shape[1] != CHANNELS:
            raise Refused(
                f"the latent has the shape {shape} and CogVideoX takes [batch, {CHANNELS}, frames, height, width]: "
                "use EmptyHunyuanLatentVideo, or encode with a CogVideoX VAE."
            )
        if min(shape) < 1:
            raise Refused(
                f"the latent has the shape {shape}, which is empty: use a batch of at least 1 and at least 16 x 16 pixels."
            )
        if latent.shape[2] % config.patch_frames:
            frames = latent.shape[2]
            fewer = f" or {frames - 1}" if frames > 1 else ""
            raise Refused(
                f"the latent has {frames} frames (of 4 video frames each, the first of 1) and CogVideoX 1.5 computes them "
                f"by twos: use {frames + 1} (a length of {4 * frames + 1} in EmptyHunyuanLatentVideo){fewer}."
            )
        text = conditioning["context"]
        if text.ndim != 3 or text.shape[1] == 0 or text.shape[2] != config.text_width:
            raise Refused(
                f"the conditioning's text has the shape {list(text.shape)} and this model takes "
                f"[batch, tokens, {config.text_width}]: use CLIPLoader with the type cogvideox and t5xxl."
            )
        self._check_image(config, latent, conditioning.get("concat"))
        size = (latent.shape[3], latent.shape[4])
        if config.learned_positions and size != SAMPLE:
            raise Refused(
                f"the latent is {size[1]} x {size[0]} and CogVideoX-5b image to video takes {SAMPLE[1]} x {SAMPLE[0]} only "
                f"({8 * SAMPLE[1]} x {8 * SAMPLE[0]} pixels), because its positions are learned: use that size."
            )

    @staticmethod
    def _check_image(config: CogVideoXConfig, latent: Tensor, image: Tensor | None) -> None:
        if not config.image_channels:
            if image is not None:
                raise Refused(
                    "the conditioning has an image and this CogVideoX model makes videos from text alone: choose an "
                    "image-to-video model, or remove the image from the conditioning."
                )
        elif image is None:
            raise Refused(
                "this CogVideoX model turns an image into a video and was given none: put InstructPixToPixConditioning "
                "with the image and the VAE between the prompts and the sampler, or choose a text-to-video model."
            )
        elif image.shape[1:] != (config.image_channels, *latent.shape[2:]):
            raise Refused(
                f"the image's latent has the shape {list(image.shape)} and [batch, {config.image_channels}, "
                f"{', '.join(map(str, latent.shape[2:]))}] is needed: encode it with a CogVideoX VAE."
            )

    def keys(self, config: CogVideoXConfig) -> KeyMap:
        """Which rows of which tensors make each parameter."""
        return cogvideox_keys(
            hidden=config.hidden,
            head_dim=config.head_dim,
            layers=config.layers,
            in_channels=config.in_channels,
            out_channels=CHANNELS,
            patch_frames=config.patch_frames,
            conv=config.patch_frames == 1,
            text_width=config.text_width,
            time_width=config.time_width,
            offset=config.offset,
            learned_positions=config.learned_positions,
        )

    def comfyui_keys(self, config: CogVideoXConfig) -> KeyMap:
        """ComfyUI's names are those of the key map."""
        return self.keys(config)

    def beside_tokens(self, config: CogVideoXConfig, conditioning: Conditioning) -> int:
        """Text."""
        return conditioning["context"].shape[1]

    def exact(self, config: CogVideoXConfig) -> frozenset[str]:
        """None: all parameters have the type that is chosen."""
        return frozenset()

    def control_blocks(self, config: CogVideoXConfig) -> Mapping[str, range]:
        """No ControlNet is supported."""
        return {}

    def build(self, config: CogVideoXConfig, stage: Stage) -> CogVideoXModel:
        """One stage of the model on the meta device."""
        return CogVideoXModel(config, stage)


def _read_config(part: Checkpoint) -> CogVideoXConfig:
    proj = sizes(part, "patch_embed.proj.weight", 2, 4)
    patch_frames = 1 if len(proj) == 4 else 2
    modulation = sizes(part, "blocks.0.norm1.linear.weight")
    hidden = proj[0]
    (head_dim,) = sizes(part, "blocks.0.norm_q.weight", 1)
    positions = "patch_embed.pos_embedding"
    return CogVideoXConfig(
        hidden=hidden,
        head_dim=head_dim,
        layers=count_blocks(part, "blocks"),
        in_channels=proj[1] if patch_frames == 1 else proj[1] // (PATCH**2 * patch_frames),
        patch_frames=patch_frames,
        text_width=sizes(part, "patch_embed.text_proj.weight")[1],
        time_width=modulation[1],
        offset="ofs_embedding_linear_1.weight" in part.entries,
        learned_positions=sizes(part, positions, 3)[1] if positions in part.entries else 0,
        rotary=patch_frames > 1 or hidden // head_dim >= LARGE_HEADS,
    )


class CogVideoXModel:
    """CogVideoXTransformer3DModel's modules, driven token run by token run."""

    def __init__(self, config: CogVideoXConfig, stage: Stage) -> None:
        from diffusers.models.transformers.cogvideox_transformer_3d import (
            CogVideoXTransformer3DModel,  # 5 s: workers only
        )

        with torch.device("meta"):
            module = CogVideoXTransformer3DModel(
                num_attention_heads=config.heads,
                attention_head_dim=config.head_dim,
                in_channels=config.in_channels,
                out_channels=CHANNELS,
                time_embed_dim=config.time_width,
                ofs_embed_dim=config.time_width if config.offset else None,
                text_embed_dim=config.text_width,
                num_layers=config.layers,
                patch_size=PATCH,
                patch_size_t=config.patch_frames if config.patch_frames > 1 else None,
                use_rotary_positional_embeddings=True,  # positions are made here, not by the module
            )
            if config.learned_positions:
                learned = torch.empty(1, config.learned_positions, config.hidden)
                module.patch_embed.pos_embedding = nn.Parameter(learned)
        self.block_modules: Sequence[nn.Module] = _keep_stage(module, stage)
        use_cast_linears(module)
        self.module: nn.Module = module.eval().requires_grad_(False)
        self.blocks: Sequence[Block] = [CogVideoXBlock(block, config.head_dim) for block in self.block_modules]
        self.heads = config.heads
        self.head_dim = config.head_dim
        self.features = config.hidden
        self._config = config
        self._cog = module

    def patches(self, latent_shape: Sequence[int], count: int) -> tuple[Patch, ...]:
        """Whole rows of tokens through all frames each, or whole frames; the last row may be a partial one."""
        grid = Grid.of(self._config, latent_shape)
        if grid.by_rows:
            dim, total, step, each = 3, grid.rows, PATCH, grid.frames * grid.columns
        else:
            dim, total, step, each = 2, grid.frames, self._config.patch_frames, grid.rows * grid.columns
        return tuple(
            Patch(
                tokens=slice(run.start * each, run.stop * each),
                dim=dim,
                span=slice(run.start * step, min(run.stop * step, latent_shape[dim])),
            )
            for run in cut(total, count)
        )

    def text_tokens(self, conditioning: Conditioning) -> int:
        """All of the text is in the sequence."""
        return conditioning["context"].shape[1]

    def embed(self, latent: Tensor, conditioning: Conditioning, layout: TokenLayout, rank: int) -> Tensor:
        """The tokens of one sequence rank, text first, with their absolute positions if the model has such."""
        embed, runs = self._cog.patch_embed, layout.image(rank)
        if "concat" in conditioning:
            latent = torch.cat([latent, conditioning["concat"]], dim=1)
        patches = self._patchify(latent)
        local = torch.cat([patches[:, run] for run in runs], dim=1)
        image = conv_as_linear(embed.proj, local) if self._config.patch_frames == 1 else embed.proj(local)
        text = embed.text_proj(conditioning["context"][:, layout.text(rank)])
        absolute = self._absolute_positions(latent.shape, latent.device)
        if absolute is not None:
            words, places = (part.to(image.dtype) for part in absolute)
            image = image + torch.cat([places[run] for run in runs])
            text = text + _rows(words, layout.text(rank))
        return torch.cat([text, image], dim=1)

    def modulation(self, timestep: Tensor, conditioning: Conditioning, dtype: torch.dtype) -> Tensor:
        """Timestep, and in 1.5 image to video the image's offset, as one vector."""
        cog = self._cog
        vec = cog.time_embedding(sinusoids(timestep, self._config.hidden).to(dtype))
        if self._config.offset:
            vec = vec + cog.ofs_embedding(sinusoids(conditioning["ofs"], self._config.time_width).to(dtype))
        return vec

    def positions(
        self,
        latent_shape: Sequence[int],
        layout: TokenLayout,
        rank: int,
        device: torch.device,
        conditioning: Conditioning,
    ) -> Tensor | None:
        """Rotary positions of frame, row and column; text is at the origin."""
        if not self._config.rotary:
            return None
        grid = Grid.of(self._config, latent_shape)
        places = grid.coordinates(device)
        local = torch.cat([places[run] for run in layout.image(rank)])
        axes = [torch.arange(grid.frames, dtype=torch.float32, device=device), *self._spatial_axes(grid, device)]
        widths = [self.head_dim // 4, self.head_dim // 8 * 3, self.head_dim // 8 * 3]
        angles = torch.cat(
            [
                torch.outer(axis[local[:, number]], 1.0 / 10000 ** (torch.arange(0, width, 2, device=device) / width))
                for number, (axis, width) in enumerate(zip(axes, widths, strict=True))
            ],
            dim=1,
        )
        angles = F.pad(angles, (0, 0, length(layout.text(rank)), 0))
        return torch.polar(torch.ones_like(angles), angles)

    def unembed(self, state: Activations) -> Tensor:
        """The model's output for the local image tokens, `[batch, local image tokens, channels * patch volume]`."""
        cog = self._cog
        shift, scale = cog.norm_out.linear(F.silu(state.vec)).chunk(2, dim=1)
        image = layer_norm(cog.norm_final, state.tokens[:, state.text :])
        return cog.proj_out(_modulate(cog.norm_out.norm, image, shift, scale))

    def assemble(self, tokens: Tensor, latent_shape: Sequence[int], patch: Patch) -> Tensor:
        """Tokens as a part of a latent, the padding cropped."""
        grid, count = Grid.of(self._config, latent_shape), tokens.shape[1]
        if grid.by_rows:
            laid = tokens.view(tokens.shape[0], count // (grid.frames * grid.columns), grid.frames, grid.columns, -1)
            laid = laid.transpose(1, 2)
        else:
            laid = tokens.view(tokens.shape[0], count // (grid.rows * grid.columns), grid.rows, grid.columns, -1)
        parts = laid.unflatten(4, (CHANNELS, self._config.patch_frames, PATCH, PATCH)).permute(0, 4, 1, 5, 2, 6, 3, 7)
        latent = parts.flatten(6, 7).flatten(4, 5).flatten(2, 3)
        return latent.narrow(patch.dim, 0, length(patch.span))[..., : latent_shape[3], : latent_shape[4]]

    def _patchify(self, latent: Tensor) -> Tensor:
        """`[batch, channels, frames, height, width]` to `[batch, tokens, channels * patch volume]`."""
        grid = Grid.of(self._config, latent.shape)
        latent = pad_circularly(latent, PATCH)
        batch, channels = latent.shape[:2]
        cells = (grid.frames, self._config.patch_frames, grid.rows, PATCH, grid.columns, PATCH)
        return grid.ordered(latent.view(batch, channels, *cells).permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4))

    def _spatial_axes(self, grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions of rows and columns; in 1.0 models those of a crop fitted to the size they were trained on."""
        if self._config.patch_frames > 1:
            return torch.arange(grid.rows, device=device).float(), torch.arange(grid.columns, device=device).float()
        base_rows, base_columns = (size // PATCH for size in SAMPLE)
        if grid.rows / grid.columns > base_rows / base_columns:
            rows, columns = base_rows, round(base_rows / grid.rows * grid.columns)
        else:
            rows, columns = round(base_columns / grid.columns * grid.rows), base_columns
        return (
            _linspace(round((base_rows - rows) / 2), rows, grid.rows, device),
            _linspace(round((base_columns - columns) / 2), columns, grid.columns, device),
        )

    def _absolute_positions(self, shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Positions added to text `[tokens, features]` (as many as are learned) and to all image tokens, if any."""
        config, grid = self._config, Grid.of(self._config, shape)
        if config.rotary and not config.learned_positions:
            return None
        if config.learned_positions and grid.frames == LEARNED_FRAMES:
            learned = self._cog.patch_embed.pos_embedding[0]
            places = learned[LEARNED_TEXT:].view(grid.frames, grid.rows, grid.columns, -1)
            return learned[:LEARNED_TEXT], grid.ordered(places)
        frame, row, column = grid.coordinates(device).unbind(1)
        spatial = 3 * config.hidden // 8
        features = [
            sine_positions(frame, config.hidden // 4),
            sine_positions(column.float() / SPATIAL_SCALE, spatial),
            sine_positions(row.float() / SPATIAL_SCALE, spatial),
        ]
        return torch.zeros(0, config.hidden, device=device), torch.cat(features, dim=1)


def _keep_stage(module: Any, stage: Stage) -> list[nn.Module]:
    """Drop what other stages hold; returns this stage's blocks. What makes `vec` stays on every stage."""
    blocks = module.transformer_blocks
    for index in range(len(blocks)):
        if not stage.start <= index < stage.stop:
            blocks[index] = nn.Identity()
    if not stage.first:
        module.patch_embed = nn.Identity()
    if not stage.last:
        module.norm_final = module.norm_out = module.proj_out = nn.Identity()
    return list(blocks[stage.start : stage.stop])


class CogVideoXBlock:
    """Joint attention and a joint MLP; text and video have modulations of their own."""

    def __init__(self, block: Any, head_dim: int) -> None:
        self._block = block
        self._head_dim = head_dim

    def before(self, state: Activations) -> tuple[Qkv, tuple[Tensor, Tensor]]:
        """q, k, v of all local tokens, and the gates of video and text."""
        attn = self._block.attn1
        x, gates = self._modulated(self._block.norm1, state.tokens, state)
        q, k, v = (proj(x).unflatten(-1, (-1, self._head_dim)) for proj in (attn.to_q, attn.to_k, attn.to_v))
        q = rotate(layer_norm(attn.norm_q, q), state.rope)
        k = rotate(layer_norm(attn.norm_k, k), state.rope)
        return (q, k, v), gates

    def after(self, state: Activations, attention: Tensor, kept: tuple[Tensor, Tensor]) -> Tensor:
        """The block's output tokens."""
        block = self._block
        tokens = self._added(state.tokens, kept, block.attn1.to_out[0](attention.flatten(2)), state.text)
        x, gates = self._modulated(block.norm2, tokens, state)
        return self._added(tokens, gates, block.ff(x), state.text)

    @staticmethod
    def _modulated(norm: Any, tokens: Tensor, state: Activations) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        shift, scale, gate, text_shift, text_scale, text_gate = norm.linear(F.silu(state.vec)).chunk(6, dim=1)
        words = _modulate(norm.norm, tokens[:, : state.text], text_shift, text_scale)
        video = _modulate(norm.norm, tokens[:, state.text :], shift, scale)
        return torch.cat([words, video], dim=1), (gate, text_gate)

    @staticmethod
    def _added(tokens: Tensor, gates: tuple[Tensor, Tensor], x: Tensor, text: int) -> Tensor:
        gate, text_gate = gates
        words = torch.addcmul(tokens[:, :text], text_gate[:, None], x[:, :text])
        return torch.cat([words, torch.addcmul(tokens[:, text:], gate[:, None], x[:, text:])], dim=1)


def _modulate(norm: nn.LayerNorm, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift[:, None], layer_norm(norm, x), (1 + scale)[:, None])


def _linspace(start: float, span: int, count: int, device: torch.device) -> Tensor:
    """`count` positions, of which the first is `start` and one more would be at `start + span`, as diffusers has them."""
    return torch.linspace(start, (start + span) * (count - 1) / count, count, device=device, dtype=torch.float32)


def _rows(table: Tensor, run: slice) -> Tensor:
    """Rows of a table, zero where it ends."""
    rows = table[run]
    return F.pad(rows, (0, 0, 0, length(run) - rows.shape[0]))

"""FLUX.1 (dev and schnell types) over diffusers' FluxTransformer2DModel, numerically as ComfyUI's Flux.

Where the two differ in low precision, ComfyUI's order is followed: timestep features are computed in fp32 and then
cast, guidance is multiplied in the compute dtype, and an odd latent is padded circularly to the patch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import Refused
from ..layout import TokenLayout, length
from ..plan import ModelShape
from ..weights.checkpoint import Checkpoint
from ..weights.flux_keys import DIFFUSERS_NAMES, HEAD_DIM, TIME_FEATURES, flux_keys
from ..weights.keymap import KeyMap, renamed, under_map_names
from ..weights.layers import rms_norm, use_cast_linears
from ..weights.scaled import resolve_scales
from .family import Activations, Block, Conditioning, Patch, Qkv, Stage
from .functions import rotate, sinusoids, text_and_references
from .inspection import check_tensors, count_blocks, find_prefix, sizes
from .picture import grid, patchify, row_patches

PATCH = 2
PREFIXES = ("", "model.diffusion_model.")
DIFFUSERS_PREFIXES = ("", "transformer.")
LATENT_CHANNELS = 16
REFERENCE_METHODS = ("offset", "index", "uxo")
TIME_FACTOR = 1000.0


@dataclass(frozen=True)
class FluxConfig:
    """The shape of a FLUX model, read off its tensors."""

    hidden: int
    double_blocks: int
    single_blocks: int
    channels: int
    """Of what is embedded: those of the latent and, in Fill, Canny and Depth models, more beside them."""
    out_channels: int
    text_width: int
    pooled_width: int
    guidance: bool

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.hidden // HEAD_DIM


class FluxFamily:
    """Reads FLUX files with Black Forest Labs' tensor names and builds the model."""

    takes: frozenset[str] | None = frozenset({"context", "y", "guidance", "concat", "reference", "reference_ids"})

    def inspect(self, checkpoint: Checkpoint) -> tuple[Checkpoint, FluxConfig]:
        """The model's own tensors and its configuration. Raises Refused where the file is no FLUX.1 model."""
        name = checkpoint.path.name
        prefix = find_prefix(checkpoint, PREFIXES, ("double_blocks.0.img_attn.qkv.weight",))
        if prefix is not None:
            part = resolve_scales(checkpoint.select(prefix, _original_name), prefix)
            config = _read_config(part, {})
        else:
            names = ("transformer_blocks.0.attn.add_q_proj.weight", "x_embedder.weight")
            prefix = find_prefix(checkpoint, DIFFUSERS_PREFIXES, names, least=2)
            if prefix is None:
                raise Refused(
                    f"{name} has no FLUX.1 tensors (double_blocks.0.img_attn.qkv.weight and so on, or diffusers' names): "
                    "choose a FLUX.1 checkpoint."
                )
            part = resolve_scales(checkpoint.select(prefix, str), prefix)
            config = _read_config(part, DIFFUSERS_NAMES)
            part = under_map_names(part, self.keys(config))
        if config.out_channels != LATENT_CHANNELS:
            raise Refused(
                f"{name} makes latents of {config.out_channels} channels and those of FLUX.1 have {LATENT_CHANNELS}: "
                "choose a FLUX.1 checkpoint."
            )
        check_tensors(part, self.keys(config), "FLUX.1", config.hidden)
        return part, config

    def shape(self, config: FluxConfig) -> ModelShape:
        """Parameters by the sizes of diffusers' modules, biases and norms left out."""
        square = config.hidden**2
        embedders = config.pooled_width + TIME_FEATURES * (1 + config.guidance)
        return ModelShape(
            name="flux",
            hidden=config.hidden,
            heads=config.heads,
            double_blocks=config.double_blocks,
            single_blocks=config.single_blocks,
            double_weights=36 * square,
            single_weights=15 * square,
            other_weights=config.hidden
            * ((config.channels + config.out_channels) * PATCH**2 + config.text_width + embedders)
            + (4 + config.guidance) * square,
            token_weights=12 * square,
            channels=config.out_channels * PATCH**2,
        )

    def token_rows(self, config: FluxConfig, latent_shape: Sequence[int]) -> int:
        """Patches are whole rows of tokens."""
        return grid(latent_shape, PATCH)[0]

    def image_tokens(self, config: FluxConfig, latent_shape: Sequence[int]) -> int:
        """One for each 2 x 2 of the latent."""
        return math.prod(grid(latent_shape, PATCH))

    def two_of_each(self, config: FluxConfig) -> tuple[FluxConfig, tuple[int, ...]]:
        """Double blocks, then single ones."""
        return replace(config, double_blocks=2, single_blocks=2), (config.double_blocks, config.single_blocks)

    def check(self, config: FluxConfig, latent: Tensor, conditioning: Conditioning) -> None:
        """Refuse a latent or conditioning of the wrong width, in one sentence with the numbers, and a mask of attention."""
        if "attention_mask" in conditioning:
            raise Refused(
                "an attention mask over text and picture cannot be used with a parallel FLUX MODEL yet: in Apply Style Model, "
                "which makes one, set strength_type to multiply, or use Load Diffusion Model."
            )
        beside = conditioning.get("concat")
        channels = config.channels - (0 if beside is None else beside.shape[1])
        if latent.ndim != 4 or latent.shape[1] != channels:
            raise Refused(
                f"the latent has the shape {list(latent.shape)} and FLUX takes [batch, {channels}, height, width]: "
                "use EmptySD3LatentImage, or encode with a FLUX VAE."
            )
        if min(latent.shape) < 1:
            raise Refused(
                f"the latent has the shape {list(latent.shape)}, with nothing in it: "
                "use a width and height of at least 16 pixels."
            )
        widths = {"context": ("text", config.text_width), "y": ("pooled text", config.pooled_width)}
        for key, (what, width) in widths.items():
            tensor = conditioning.get(key)
            if tensor is None:
                continue
            if tensor.shape[-1] < width or (key == "context" and tensor.shape[-1] != width):
                raise Refused(
                    f"the conditioning's {what} is {tensor.shape[-1]} wide and this model takes {width}: "
                    "use the text encoders that belong to the model (for FLUX.1: t5xxl and clip_l)."
                )
        if conditioning["context"].ndim != 3 or conditioning["context"].shape[1] == 0:
            raise Refused(
                f"the conditioning's text has the shape {list(conditioning['context'].shape)} and "
                f"[batch, tokens, {config.text_width}] with at least one token is needed: encode a prompt."
            )

    def keys(self, config: FluxConfig) -> KeyMap:
        """Which rows of which tensors make each parameter."""
        return flux_keys(**asdict(config))

    def comfyui_keys(self, config: FluxConfig) -> KeyMap:
        """ComfyUI's names are Black Forest Labs', but for the norms' scales."""
        return renamed(
            self.keys(config), lambda name: name.removesuffix(".scale") + ".weight" * name.endswith(".scale")
        )

    def beside_tokens(self, config: FluxConfig, conditioning: Conditioning) -> int:
        """Text, and reference pictures."""
        return text_and_references(conditioning)

    def exact(self, config: FluxConfig) -> frozenset[str]:
        """None: all parameters have the type that is chosen."""
        return frozenset()

    def control_blocks(self, config: FluxConfig) -> Mapping[str, range]:
        """Double blocks take `input`, single ones `output`."""
        doubles = config.double_blocks
        return {"input": range(doubles), "output": range(doubles, doubles + config.single_blocks)}

    def build(self, config: FluxConfig, stage: Stage) -> FluxModel:
        """One stage of the model on the meta device."""
        return FluxModel(config, stage)


def is_flux2(checkpoint: Checkpoint) -> bool:
    """Whether a file holds a FLUX.2 model, which is of another family."""
    return find_prefix(checkpoint, PREFIXES, ("double_stream_modulation_img.lin.weight",)) is not None


def _original_name(name: str) -> str:
    """ComfyUI saves the norms' scales under another name than Black Forest Labs."""
    return name.removesuffix(".weight") + ".scale" if name.endswith("_norm.weight") else name


def _read_config(part: Checkpoint, names: Mapping[str, str]) -> FluxConfig:
    """The shape of a model whose tensors have the original names, or what `names` says instead."""

    def known(stem: str) -> str:
        return names.get(stem, stem)

    def size(stem: str) -> tuple[int, ...]:
        return sizes(part, f"{known(stem)}.weight")

    try:
        hidden, patch = size("img_in")
        return FluxConfig(
            hidden=hidden,
            double_blocks=count_blocks(part, known("double_blocks")),
            single_blocks=count_blocks(part, known("single_blocks")),
            channels=patch // PATCH**2,
            out_channels=size("final_layer.linear")[0] // PATCH**2,
            text_width=size("txt_in")[1],
            pooled_width=size("vector_in.in_layer")[1],
            guidance=f"{known('guidance_in.in_layer')}.weight" in part.entries,
        )
    except KeyError as missing:
        raise Refused(f"{part.path.name} lacks the FLUX.1 tensor {missing}: choose a complete FLUX.1 file.") from None


class FluxModel:
    """FluxTransformer2DModel's modules, driven token run by token run."""

    def __init__(self, config: FluxConfig, stage: Stage) -> None:
        from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel  # 5 s: workers only

        with torch.device("meta"):
            module = FluxTransformer2DModel(
                in_channels=config.channels * PATCH**2,
                out_channels=config.out_channels * PATCH**2,
                num_layers=config.double_blocks,
                num_single_layers=config.single_blocks,
                attention_head_dim=HEAD_DIM,
                num_attention_heads=config.heads,
                joint_attention_dim=config.text_width,
                pooled_projection_dim=config.pooled_width,
                guidance_embeds=config.guidance,
            )
        self.block_modules: Sequence[nn.Module] = _keep_stage(module, stage)
        use_cast_linears(module)
        self.module: nn.Module = module.eval().requires_grad_(False)
        self.heads = config.heads
        self.head_dim = HEAD_DIM
        self.features = config.hidden
        doubles = max(0, config.double_blocks - stage.start)
        self.blocks: Sequence[Block] = [
            DoubleBlock(block) if index < doubles else SingleBlock(block)
            for index, block in enumerate(self.block_modules)
        ]
        self._config = config
        self._flux = module

    def patches(self, latent_shape: Sequence[int], count: int) -> tuple[Patch, ...]:
        """Whole rows of tokens each; the last patch of an odd latent has a partial row."""
        return row_patches(latent_shape, PATCH, count)

    def text_tokens(self, conditioning: Conditioning) -> int:
        """All of the text is in the sequence."""
        return conditioning["context"].shape[1]

    def embed(self, latent: Tensor, conditioning: Conditioning, layout: TokenLayout, rank: int) -> Tensor:
        """The tokens of one sequence rank: text, references, image."""
        beside = conditioning.get("concat")
        patches = patchify(latent if beside is None else torch.cat([latent, beside], dim=1), PATCH)
        image = self._flux.x_embedder(torch.cat([patches[:, run] for run in layout.image(rank)], dim=1))
        text = self._flux.context_embedder(conditioning["context"][:, layout.text(rank)])
        references = conditioning.get("reference")
        if references is None:
            return torch.cat([text, image], dim=1)
        return torch.cat([text, self._flux.x_embedder(references[:, layout.references(rank)]), image], dim=1)

    def modulation(self, timestep: Tensor, conditioning: Conditioning, dtype: torch.dtype) -> Tensor:
        """Timestep, guidance and pooled text as one vector."""
        embed = self._flux.time_text_embed
        vec = embed.timestep_embedder(_time_features(timestep).to(dtype))
        guidance = conditioning.get("guidance")
        if self._config.guidance and guidance is not None:
            vec = vec + embed.guidance_embedder(_time_features(guidance).to(dtype))
        pooled = conditioning.get("y")
        if pooled is None:
            pooled = torch.zeros(timestep.shape[0], self._config.pooled_width, device=timestep.device, dtype=dtype)
        return vec + embed.text_embedder(pooled[:, : self._config.pooled_width])

    def positions(
        self,
        latent_shape: Sequence[int],
        layout: TokenLayout,
        rank: int,
        device: torch.device,
        conditioning: Conditioning,
    ) -> Tensor:
        """Rotary positions; text is at the origin."""
        text = torch.zeros(length(layout.text(rank)), 3, device=device)
        image = _positions(latent_shape, device)
        ids = [image[run] for run in layout.image(rank)]
        if "reference_ids" in conditioning:
            ids.insert(0, conditioning["reference_ids"][0, layout.references(rank)].to(device).float())
        cosine, sine = self._flux.pos_embed(
            torch.cat([text, *ids])
        )  # each number twice, for the two features of a pair
        return torch.complex(cosine[:, ::2], sine[:, ::2])

    def unembed(self, state: Activations) -> Tensor:
        """The velocity of the local image tokens, `[batch, local image tokens, channels * patch area]`."""
        head = self._flux.norm_out
        scale, shift = head.linear(F.silu(state.vec)).chunk(2, dim=1)
        return self._flux.proj_out(_modulate(state.image, shift, scale))

    def assemble(self, tokens: Tensor, latent_shape: Sequence[int], patch: Patch) -> Tensor:
        """Rows of tokens as rows of a latent, the padding cropped."""
        _, columns = grid(latent_shape, PATCH)
        squares = tokens.unflatten(1, (-1, columns)).unflatten(3, (-1, PATCH, PATCH)).permute(0, 3, 1, 4, 2, 5)
        return squares.flatten(4, 5).flatten(2, 3)[:, :, : length(patch.span), : latent_shape[3]]


def _keep_stage(module: Any, stage: Stage) -> list[nn.Module]:
    """Drop what other stages hold; returns this stage's blocks. What makes `vec` stays on every stage."""
    everything = [(module.transformer_blocks, i) for i in range(len(module.transformer_blocks))]
    everything += [(module.single_transformer_blocks, i) for i in range(len(module.single_transformer_blocks))]
    for number, (blocks, index) in enumerate(everything):
        if not stage.start <= number < stage.stop:
            blocks[index] = nn.Identity()
    if not stage.first:
        module.x_embedder = module.context_embedder = nn.Identity()
    if not stage.last:
        module.norm_out = module.proj_out = nn.Identity()
    return [blocks[index] for blocks, index in everything[stage.start : stage.stop]]


class DoubleBlock:
    """A block with separate weights for text and image tokens and joint attention."""

    def __init__(self, block: Any) -> None:
        self._block = block

    def before(self, state: Activations) -> tuple[Qkv, tuple[Tensor, Tensor]]:
        """q, k, v of all local tokens and the modulations of both streams."""
        attn, text = self._block.attn, state.text
        image_mod = self._block.norm1.linear(F.silu(state.vec))
        text_mod = self._block.norm1_context.linear(F.silu(state.vec))
        image = _modulate(state.tokens[:, text:], *image_mod.chunk(6, dim=1)[:2])
        words = _modulate(state.tokens[:, :text], *text_mod.chunk(6, dim=1)[:2])
        words_q = rms_norm(attn.norm_added_q, _split(attn.add_q_proj(words)))
        words_k = rms_norm(attn.norm_added_k, _split(attn.add_k_proj(words)))
        q = torch.cat([words_q, rms_norm(attn.norm_q, _split(attn.to_q(image)))], dim=1)
        k = torch.cat([words_k, rms_norm(attn.norm_k, _split(attn.to_k(image)))], dim=1)
        v = torch.cat([_split(attn.add_v_proj(words)), _split(attn.to_v(image))], dim=1)
        return (rotate(q, state.rope), rotate(k, state.rope), v), (text_mod, image_mod)

    def after(self, state: Activations, attention: Tensor, kept: tuple[Tensor, Tensor]) -> Tensor:
        """Both streams' outputs, text first."""
        block, text = self._block, state.text
        joined = attention.flatten(2)
        words = self._stream(state.tokens[:, :text], block.attn.to_add_out(joined[:, :text]), kept[0], block.ff_context)
        image = self._stream(state.tokens[:, text:], block.attn.to_out[0](joined[:, text:]), kept[1], block.ff)
        return _finite(torch.cat([words, image], dim=1))

    @staticmethod
    def _stream(x: Tensor, attention: Tensor, modulation: Tensor, feed_forward: nn.Module) -> Tensor:
        _, _, gate, shift, scale, mlp_gate = modulation.chunk(6, dim=1)
        x = torch.addcmul(x, gate[:, None], attention)
        return torch.addcmul(x, mlp_gate[:, None], feed_forward(_modulate(x, shift, scale)))


class SingleBlock:
    """A block that treats text and image tokens alike, its MLP parallel to its attention."""

    def __init__(self, block: Any) -> None:
        self._block = block

    def before(self, state: Activations) -> tuple[Qkv, tuple[Tensor, Tensor]]:
        """q, k, v of all local tokens; carried on are the modulated tokens and the gate."""
        attn = self._block.attn
        shift, scale, gate = self._block.norm.linear(F.silu(state.vec)).chunk(3, dim=1)
        x = _modulate(state.tokens, shift, scale)
        q = rotate(rms_norm(attn.norm_q, _split(attn.to_q(x))), state.rope)
        k = rotate(rms_norm(attn.norm_k, _split(attn.to_k(x))), state.rope)
        return (q, k, _split(attn.to_v(x))), (x, gate)

    def after(self, state: Activations, attention: Tensor, kept: tuple[Tensor, Tensor]) -> Tensor:
        """The block's output tokens."""
        x, gate = kept
        mlp = self._block.proj_mlp(x)
        joined = mlp.new_empty(*mlp.shape[:2], x.shape[2] + mlp.shape[2])  # joining them later would copy all of it
        joined[..., : x.shape[2]] = attention.flatten(2)
        torch.ops.aten.gelu.out(mlp, approximate="tanh", out=joined[..., x.shape[2] :])
        out = self._block.proj_out(joined)
        return _finite(torch.addcmul(state.tokens, gate[:, None], out))


def _positions(latent_shape: Sequence[int], device: torch.device) -> Tensor:
    """`[image tokens, 3]`: 0, row, column."""
    rows, columns = grid(latent_shape, PATCH)
    ids = torch.zeros(rows, columns, 3, device=device)
    ids[..., 1] = torch.arange(rows, device=device)[:, None]
    ids[..., 2] = torch.arange(columns, device=device)
    return ids.view(-1, 3)


def reference_tokens(latents: Sequence[Tensor], method: str, latent_shape: Sequence[int]) -> dict[str, Tensor]:
    """Reference pictures as the conditioning `reference` and `reference_ids`, placed as ComfyUI's Flux places them.

    Args:
        latents: `[any batch, 16, height, width]` each, of any size; the samples of each are repeated to all others'.
        method: "offset" lays them side by side in a plane of their own, "index" each into a plane of its own, "uxo"
            diagonally behind the picture.
        latent_shape: of the picture's latent.

    Raises:
        Refused: another method, or latents of another kind of model.
    """
    for latent in latents:
        if latent.ndim != 4 or latent.shape[1] != LATENT_CHANNELS or min(latent.shape) < 1:
            raise Refused(
                f"a reference latent has the shape {list(latent.shape)} and FLUX takes "
                f"[batch, {LATENT_CHANNELS}, height, width]: encode the reference picture with a FLUX VAE."
            )
    if method not in REFERENCE_METHODS:
        raise Refused(
            f"the reference latents method {method} is not supported ({', '.join(REFERENCE_METHODS)} are): set it in "
            "FluxKontextMultiReferenceLatentMethod."
        )
    tokens, ids = [], []
    index = height = width = 0
    batch = math.lcm(*(latent.shape[0] for latent in latents))
    for latent in latents:
        across = down = 0
        if method == "index":
            index += 1
        elif method == "uxo":
            rows, columns = (PATCH * _half_up(size) for size in latent_shape[2:])
            down, across = rows + height, columns + width
            height, width = height + latent.shape[2], width + latent.shape[3]
        else:
            index = 1
            if latent.shape[2] + height > latent.shape[3] + width:
                across = width
            else:
                down = height
            height, width = max(height, latent.shape[2] + down), max(width, latent.shape[3] + across)
        tokens.append(patchify(latent, PATCH).repeat(batch // latent.shape[0], 1, 1))
        ids.append(
            _positions(latent.shape, latent.device)
            + torch.tensor([index, _half_up(down), _half_up(across)], device=latent.device)
        )
    positions = torch.cat(ids).long().expand(batch, -1, -1)
    return {"reference": torch.cat(tokens, dim=1), "reference_ids": positions}


def _half_up(size: int) -> int:
    return (size + PATCH // 2) // PATCH


def _time_features(time: Tensor) -> Tensor:
    """Sinusoidal features `[batch, 256]` in fp32; scaled in the input's dtype."""
    return sinusoids(TIME_FACTOR * time, TIME_FEATURES)


def _split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, HEAD_DIM))


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift[:, None], F.layer_norm(x, x.shape[-1:], eps=1e-6), 1 + scale[:, None])


def _finite(x: Tensor) -> Tensor:
    """In fp16, overflow is clamped to the largest number, where ComfyUI does so."""
    return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504) if x.dtype == torch.float16 else x

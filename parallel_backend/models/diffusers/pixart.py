"""PixArt-alpha and PixArt-Sigma on diffusers' PixArtTransformer2DModel, with the results of diffusers' PixArtAlphaPipeline.

Two details are as in ComfyUI. All text counts if there is no mask, and a latent of odd height or width is padded circularly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...diffusion import Value
from ...errors import Refused
from ...plan import ModelShape
from ...weights.files.checkpoint import Checkpoint
from ...weights.files.keymap import KeyMap, under_map_names
from ...weights.files.scaled_fp8 import resolve_scales
from ...weights.layers.cast import use_cast_tables
from ..declared.pixart import PIXART
from ..family import Conditioning
from ..inputs import Inputs
from ..inspection import check_tensors, count_blocks, find_prefix, sizes
from ..sequence_parallel.blocks import ParallelModel
from .diffusers_family import DiffusersFamily, padded
from .model import Call
from .pixart_keys import PATCH, TIME_FEATURES, pixart_keys

PREFIXES = ("", "model.diffusion_model.")
ORIGINAL_NAMES = {
    "marker": "t_block.1.weight",
    "image": "x_embedder.proj.weight",
    "text": "y_embedder.y_proj.fc1.weight",
    "output": "final_layer.linear.weight",
    "size": "csize_embedder.mlp.0.weight",
    "blocks": "blocks",
}
DIFFUSERS_NAMES = {
    "marker": "caption_projection.linear_1.weight",
    "image": "pos_embed.proj.weight",
    "text": "caption_projection.linear_1.weight",
    "output": "proj_out.weight",
    "size": "adaln_single.emb.resolution_embedder.linear_1.weight",
    "blocks": "transformer_blocks",
}
"""Names of the tensors from which the shape of the model is read, in files of the original and of diffusers."""

HEADS = 16
"""The number of heads of all published models; a file does not hold it."""

SAMPLE = 64
"""The size of latent whose grid gives the positions of all latents, also in models that were trained on larger ones."""


@dataclass(frozen=True)
class PixArtConfig:
    """The shape of a PixArt model, read from its tensors."""

    hidden: int
    layers: int
    channels: int
    out_channels: int
    text_width: int
    micro_conditions: bool

    @property
    def patch_size(self) -> tuple[int, int]:
        """Return the latent values of one token in height and width."""
        return PATCH, PATCH

    @property
    def head_dim(self) -> int:
        """Return the number of features of an attention head."""
        return self.hidden // HEADS


class PixArtFamily(DiffusersFamily[PixArtConfig]):
    """The family of PixArt, which reads files with the original or diffusers' tensor names and builds the model."""

    declaration = PIXART
    conditioning_names: frozenset[str] | None = frozenset({"context", "attention_mask", "c_size", "c_ar"})

    def inspect(self, checkpoint: Checkpoint) -> tuple[Checkpoint, PixArtConfig]:
        """Return the model's tensors and its configuration.

        Raises:
            Refused: the file holds no supported PixArt model.
        """
        name = checkpoint.path.name
        prefix = find_prefix(checkpoint, PREFIXES, (ORIGINAL_NAMES["marker"], DIFFUSERS_NAMES["marker"]))
        if prefix is None:
            raise Refused(f"{name} has no PixArt tensors: choose a PixArt-alpha or PixArt-Sigma file.")
        part = resolve_scales(checkpoint.select(prefix, str), prefix)
        if any(".attn.sr." in tensor for tensor in part.entries):
            raise Refused(f"{name} compresses its keys and values, which is not supported: choose another PixArt file.")
        original = ORIGINAL_NAMES["marker"] in part.entries
        try:
            config = _read_config(part, ORIGINAL_NAMES if original else DIFFUSERS_NAMES)
        except KeyError as missing:
            raise Refused(f"{name} lacks the PixArt tensor {missing}: choose a complete PixArt file.") from None
        if config.hidden % HEADS:
            raise Refused(
                f"{name} has {config.hidden} features, which is not a multiple of its {HEADS} attention heads: choose "
                "another PixArt file."
            )
        if not original:
            part = under_map_names(part, self.keys(config))
        check_tensors(part, self.keys(config), "PixArt", config.hidden)
        return part, config

    def shape(self, config: PixArtConfig) -> ModelShape:
        """Return the model's size and limits. The numbers of parameters leave out biases."""
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
            token_weights=14 * square,  # the cross-attention's keys and values come from the text alone
            channels=config.channels * patch,
            text=120,
            joint_text=False,
            guided=True,
            embeds_whole=True,
        )

    def two_of_each(self, config: PixArtConfig) -> tuple[PixArtConfig, tuple[int, ...]]:
        """Return a configuration of two blocks and the real number of blocks. The model has one kind of block."""
        return replace(config, layers=2), (config.layers,)

    def check(
        self, config: PixArtConfig, latent: Tensor, conditioning: Conditioning, values: Mapping[str, Value]
    ) -> None:
        """Refuse inputs of the wrong size. The message has the numbers."""
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
        """Return the key map: for each parameter, the tensor and rows of the file that it is made of."""
        return pixart_keys(**asdict(config))

    def make(self, config: PixArtConfig) -> nn.Module:
        """Make diffusers' module. Positions are computed for each call."""
        from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel  # 5 s: workers only

        module = PixArtTransformer2DModel(
            num_attention_heads=HEADS,
            attention_head_dim=config.head_dim,
            in_channels=config.channels,
            out_channels=config.out_channels,
            num_layers=config.layers,
            cross_attention_dim=config.hidden,
            caption_channels=config.text_width,
            sample_size=SAMPLE,
            use_additional_conditions=config.micro_conditions,
        )
        embed: Any = module.pos_embed
        embed.height = embed.width = 0  # no latent has this size, so positions are computed for each call
        embed.pos_embed = torch.empty(1, 0, config.hidden, device="cpu")
        for with_table in (module, *module.transformer_blocks):
            use_cast_tables(with_table)
        return module  # type: ignore[no-any-return]

    def call(self, config: PixArtConfig) -> Call:
        """Return the function that runs the model's forward with ComfyUI's conditioning."""
        return _call


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


def _call(spread: ParallelModel, latent: Tensor, inputs: Inputs) -> Tensor:
    """Return the predicted noise. The model's prediction of the variance is dropped."""
    conditioning = inputs.conditioning
    mask = conditioning.get("attention_mask")
    (out,) = spread.entrance(
        padded(latent, PATCH),
        encoder_hidden_states=conditioning["context"],
        timestep=inputs.timestep,
        added_cond_kwargs={"resolution": conditioning.get("c_size"), "aspect_ratio": conditioning.get("c_ar")},
        encoder_attention_mask=None if mask is None else mask.flatten(1),
        return_dict=False,
    )
    return out[:, : latent.shape[1], : latent.shape[2], : latent.shape[3]]  # type: ignore[no-any-return]

"""The family of all models of ComfyUI's that no declaration says how to spread: each rank runs ComfyUI's own forward whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...diffusion import Value
from ...errors import Refused
from ...plan import ModelShape
from ...weights.files.checkpoint import Checkpoint, TensorEntry
from ...weights.files.keymap import KeyMap, Piece
from ..family import Conditioning, Stage
from ..inspection import check_tensors
from .comfy_family import UNCONVERTED, find, make
from .computed_buffers import compute_buffers, missing_buffers
from .importing import import_comfyui
from .quantised_layers import pieces_of, quantise_layers
from .whole_model import WholeModel

NAME = "whole"
"""The family's, in requests."""

SEQUENCES = frozenset({"TripoSplat"})
"""Classes whose latents are `[batch, tokens, channels]`."""

VOXELS = frozenset({"Trellis2"})
"""Classes whose latents are a cube of voxels, or the list of some, whose third dimension is of size 1."""

WIDTHS = {"context": "context_dim", "y": "adm_in_channels"}
"""Of UNets what a prompt's text and its pooled text are called in ComfyUI's configuration."""


@dataclass(frozen=True)
class WholeConfig:
    """A model as ComfyUI detects it; fields are as ComfyConfig's.

    `base` is ComfyUI's model on the meta device: asked about sizes and memory, never run. `entries` says where those of
    `tensors` lie that its class may look into. `latent_dims` counts a latent's
    dimensions behind its channels.
    """

    kind: str
    described: Any
    base_model: Any
    tensors: Mapping[str, Tensor]
    entries: Mapping[str, TensorEntry]
    shape: ModelShape
    latent_channels: int
    latent_dims: int
    part: Checkpoint
    quantisation: Mapping[str, Tensor]
    keys: KeyMap
    names: KeyMap
    exact: frozenset[str]
    sigmas: bool = True

    def base(self, dtype: torch.dtype) -> Any:
        """ComfyUI's model on the meta device, its weights of a type."""
        return make(self.described, self.tensors, dtype, self.entries)


class WholeFamily:
    """Reads files as ComfyUI does and builds ComfyUI's own model; nothing but its class is known."""

    takes: frozenset[str] | None = None
    asks = frozenset({"process_timestep"})
    imports: tuple[str, ...] = ()

    def inspect(self, checkpoint: Checkpoint) -> tuple[Checkpoint, WholeConfig]:
        """The model's own tensors under ComfyUI's names, and what ComfyUI finds it to be.

        Raises:
            Refused: ComfyUI does not know the model, or it lacks tensors.
        """
        import_comfyui()
        detected = find(checkpoint)
        part, described, base = detected.part, detected.described, detected.base
        kind, module = type(described).__name__, base.diffusion_model
        compute_buffers(module, described, detected.tensors, detected.entries)
        if missing := missing_buffers(module):
            raise Refused(
                f"{part.path.name} is a {kind} model, whose {missing[0]} is computed when the model is made, which this pack "
                "does not do yet: use Load Diffusion Model."
            )
        formats = base.latent_format
        parameters = sum(parameter.numel() for parameter in module.parameters())
        shape = plan_shape(kind, parameters, formats.latent_channels)
        exact = {key for key, parameter in module.named_parameters() if parameter.dtype == torch.float32}
        names = {key: _whole(key, parameter) for key, parameter in module.named_parameters()}
        quantised_entries = quantise_layers(module, part, detected.quantisation, described)
        plain = {key: names[key] for key, _ in module.named_parameters() if key not in quantised_entries}
        check_tensors(part, plain, kind)
        model_part = replace(part, entries={key: part.entries[key] for key in plain} | quantised_entries)
        config = WholeConfig(
            kind=kind,
            described=described,
            base_model=base,
            tensors=detected.tensors,
            entries=detected.entries,
            shape=shape,
            latent_channels=formats.latent_channels,
            latent_dims=formats.latent_dimensions,
            part=part,
            quantisation=detected.quantisation,
            keys=plain | pieces_of(quantised_entries),
            names=names,
            exact=frozenset(exact),
        )
        return model_part, config

    def shape(self, config: WholeConfig) -> ModelShape:
        """One block that is the model."""
        return config.shape

    def token_rows(self, config: WholeConfig, latent_shape: Sequence[int]) -> int:
        """One: a latent is not cut into patches."""
        return 1

    def image_tokens(self, config: WholeConfig, latent_shape: Sequence[int]) -> int:
        """As many as the latent has positions."""
        return math.prod(latent_shape[2:])

    def beside_tokens(self, config: WholeConfig, conditioning: Conditioning) -> int:
        """The text's, where there is some."""
        text = conditioning.get("context")
        return 0 if text is None or text.ndim < 2 else text.shape[1]

    def two_of_each(self, config: WholeConfig) -> tuple[WholeConfig, tuple[int, ...]]:
        """The model itself, which has one block."""
        return config, (1,)

    def item_bytes(
        self, config: WholeConfig, latent_shape: Sequence[int], conditioning: Conditioning, dtype: torch.dtype
    ) -> float:
        """What ComfyUI takes a forward to need for each batch item, in a compute dtype."""
        base, item_shape = config.base_model, [1, *latent_shape[1:]]
        base.manual_cast_dtype = dtype  # what it takes for the type of the computation
        shapes = {
            name.partition(".")[0]: [[1, *tensor.shape[1:]]] for name, tensor in conditioning.items() if tensor.ndim > 1
        }
        return float(base.memory_required(item_shape, cond_shapes=shapes))

    def check(
        self, config: WholeConfig, latent: Tensor, conditioning: Conditioning, values: Mapping[str, Value]
    ) -> None:
        """Refuse a latent of another kind, and of UNets texts of another width, with the numbers."""
        shape, channels = list(latent.shape), config.latent_channels
        sizes = {1: "length", 2: "height, width", 3: "frames, height, width"}[config.latent_dims]
        dims, channel_dim, takes = config.latent_dims + 2, 1, f"{channels}, {sizes}"
        if config.kind in SEQUENCES:
            dims, channel_dim, takes = 3, 2, f"tokens, {channels}"
        if config.kind in VOXELS:
            dims, takes = latent.ndim if latent.ndim in (4, 5) else 5, f"{channels}, ...voxels"
        if latent.ndim != dims or shape[channel_dim] != channels or min(shape) < 1:
            raise Refused(
                f"the latent has the shape {shape} and {config.kind} takes [batch, {takes}], none of them 0: use the empty "
                "latent or the VAE that belongs to this model."
            )
        for name, key in WIDTHS.items():
            tensor, width = conditioning.get(name), config.described.unet_config.get(key)
            if not isinstance(width, int) or (
                tensor is not None and tensor.shape[-1] == width and min(tensor.shape) > 0
            ):
                continue
            actual = "missing" if tensor is None else f"of the shape {list(tensor.shape)}"
            what = "text" if name == "context" else "pooled text"
            raise Refused(
                f"the conditioning's {what} is {actual} and {config.kind} takes one {width} wide: use the text encoder that "
                "belongs to this model."
            )

    def couples_rows(self, config: WholeConfig, conditioning: Conditioning) -> str:
        """Nothing that is known beforehand: a worker tries it (worker/requests/row_coupling.py)."""
        return ""

    def keys(self, config: WholeConfig) -> KeyMap:
        """Each parameter is a tensor of its own name."""
        return config.keys

    def comfyui_keys(self, config: WholeConfig) -> KeyMap:
        """As `keys`, but that weights are whole which ranks hold in parts."""
        return config.names

    def exact(self, config: WholeConfig) -> frozenset[str]:
        """Those that ComfyUI's class makes fp32 whatever type is chosen."""
        return config.exact

    def control_blocks(self, config: WholeConfig) -> Mapping[str, range]:
        """None: a ControlNet's output goes into the forward as ComfyUI gives it."""
        return {}

    def build(self, config: WholeConfig, stage: Stage) -> WholeModel:
        """The model on the meta device."""
        base = config.base(UNCONVERTED)
        compute_buffers(base.diffusion_model, config.described, config.tensors, config.entries)
        quantise_layers(base.diffusion_model, config.part, config.quantisation, config.described)
        return WholeModel(base)


def plan_shape(kind: str, parameters: int, channels: int) -> ModelShape:
    """What plans go by: one block, which holds all weights."""
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
        whole=True,
    )


def _whole(name: str, parameter: Tensor) -> Piece:
    rows = parameter.shape[0] if parameter.ndim else 1
    return Piece(name, 0, rows, tuple(parameter.shape[1:]))

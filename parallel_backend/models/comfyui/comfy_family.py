"""The family of all models that ComfyUI knows and a declaration says how to spread."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import Refused
from ...plan import ModelShape
from ...weights.checkpoint import Checkpoint
from ...weights.keymap import KeyMap, Piece
from ...weights.scaled import resolve_scales
from ..declared import DECLARATIONS
from ..family import Conditioning, Stage
from ..inspection import check_tensors
from ..spread.blocks import Block, blocks_of
from ..spread.declaration import Declaration
from ..spread.picture import Picture, as_patch_size
from .importing import import_comfyui
from .model import ComfyModel

UNCONVERTED = torch.float16
"""The type in which models are built on the meta device; ComfyUI's classes make some parameters fp32 whatever is asked for."""

REFERENCES = ("ref_latents", "ref_latent", "context_latents", "vace_context")
"""Conditioning whose latents become tokens."""

MODULATION = ("mod", "adaLN", "modulation")
"""In the names of layers that are applied once a call, not once a token."""


@dataclass(frozen=True)
class ComfyConfig:
    """A model as ComfyUI detects it.

    `kind` is the name of its class in comfy.supported_models, `described` an instance of it, `tensors` the file's tensors
    on the meta device. `blocks` are how many blocks of each group there are if not all: for timing.
    """

    kind: str
    described: Any
    declaration: Declaration
    tensors: Mapping[str, Tensor]
    shape: ModelShape
    patch_size: tuple[int, ...]
    latent_channels: int
    text_width: int
    keys: KeyMap
    exact: frozenset[str]
    two_of_each: bool = False

    def base(self, dtype: torch.dtype) -> Any:
        """ComfyUI's model on the meta device, its weights of a type."""
        return make(self.described, self.tensors, dtype)


class ComfyFamily:
    """Reads files as ComfyUI does and builds ComfyUI's own model."""

    takes: frozenset[str] | None = None

    def inspect(self, checkpoint: Checkpoint) -> tuple[Checkpoint, ComfyConfig]:
        """The model's own tensors under ComfyUI's names, and what ComfyUI finds it to be.

        Raises:
            Refused: ComfyUI does not know the model, or it has no declaration, or lacks tensors.
        """
        import_comfyui()
        import comfy.model_detection

        name = checkpoint.path.name
        prefix = comfy.model_detection.unet_prefix_from_state_dict(checkpoint.entries)
        if not any(entry.startswith(prefix) for entry in checkpoint.entries):
            prefix = ""
        part = resolve_scales(checkpoint.select(prefix, str), prefix)
        described = comfy.model_detection.model_config_from_unet(part.meta_tensors(), "", metadata=dict(part.metadata))
        if described is None:
            raise Refused(
                f"{name} is no diffusion model that ComfyUI knows under these tensor names: choose another file."
            )
        kind = type(described).__name__
        if kind not in DECLARATIONS:
            raise Refused(
                f"{name} is a {kind} model, which is not supported yet ({', '.join(DECLARATIONS)} are): use Load Diffusion "
                "Model."
            )
        part = _under_comfyui_names(part, described)
        declaration = DECLARATIONS[kind]
        base = make(described, part.meta_tensors(), UNCONVERTED)
        module = base.diffusion_model
        if lacking := declaration.lacking(module):
            raise Refused(f"{name} takes {lacking}, which is not supported yet: use Load Diffusion Model.")
        declaration.compute(module)
        if missing := _not_computed(module):
            raise Refused(
                f"{name} is a {kind} model, whose {missing[0]} no file has: update this pack, or use Load Diffusion Model."
            )
        keys = {key: _whole(key, parameter) for key, parameter in module.named_parameters()}
        blocks = blocks_of(module, declaration)
        channels, dims = base.latent_format.latent_channels, base.latent_format.latent_dimensions
        config = ComfyConfig(
            kind=kind,
            described=described,
            declaration=declaration,
            tensors=part.meta_tensors(),
            shape=_shape(kind, module, declaration, blocks, channels, dims),
            patch_size=as_patch_size(declaration.patch_size(module), dims),
            latent_channels=channels,
            text_width=declaration.text_width(module),
            keys=keys,
            exact=frozenset(key for key, parameter in module.named_parameters() if parameter.dtype == torch.float32),
        )
        check_tensors(part, keys, kind, config.shape.hidden)
        return part, config

    def shape(self, config: ComfyConfig) -> ModelShape:
        """Counted on the model itself."""
        return config.shape

    def token_rows(self, config: ComfyConfig, latent_shape: Sequence[int]) -> int:
        """Patches are rows of tokens, or frames."""
        return Picture(tuple(latent_shape), config.patch_size).most_patches

    def image_tokens(self, config: ComfyConfig, latent_shape: Sequence[int]) -> int:
        """As many as the model makes of it."""
        return Picture(tuple(latent_shape), config.patch_size).tokens

    def two_of_each(self, config: ComfyConfig) -> tuple[ComfyConfig, tuple[int, ...]]:
        """The first two blocks of each kind."""
        counts = tuple(count for count in (config.shape.double_blocks, config.shape.single_blocks) if count)
        return replace(config, two_of_each=True), counts

    def check(self, config: ComfyConfig, latent: Tensor, conditioning: Conditioning) -> None:
        """Refuse a latent or text of the wrong kind, with the numbers."""
        shape, dims = list(latent.shape), len(config.patch_size)
        if latent.ndim != dims + 2 or latent.shape[1] != config.latent_channels:
            sizes = "height, width" if dims == 2 else "frames, height, width"
            raise Refused(
                f"the latent has the shape {shape} and {config.kind} takes [batch, {config.latent_channels}, {sizes}]: use the "
                "empty latent or the VAE that belongs to this model."
            )
        if min(shape) < 1:
            raise Refused(f"the latent has the shape {shape}, with nothing in it: use a larger size.")
        text = conditioning.get("context")
        if text is None or text.ndim != 3 or text.shape[1] == 0 or text.shape[2] != config.text_width:
            found = "missing" if text is None else f"of the shape {list(text.shape)}"
            raise Refused(
                f"the conditioning's text is {found} and {config.kind} takes [batch, tokens, {config.text_width}]: use the text "
                "encoder that belongs to this model."
            )
        for name in config.declaration.refused:
            if any(given.split(".")[0] == name for given in conditioning):
                raise Refused(
                    f"{name} in the conditioning is not supported with a parallel {config.kind} model: remove the node that "
                    "adds it, or use Load Diffusion Model."
                )

    def keys(self, config: ComfyConfig) -> KeyMap:
        """Each parameter is a tensor of its own name."""
        return config.keys

    def comfyui_keys(self, config: ComfyConfig) -> KeyMap:
        """As `keys`."""
        return config.keys

    def beside_tokens(self, config: ComfyConfig, conditioning: Conditioning) -> int:
        """The text, and every latent that is given as a reference."""
        latents = [tensor for name, tensor in conditioning.items() if name.split(".")[0] in REFERENCES]
        pictures = (
            Picture(tuple(latent.shape), config.patch_size)
            for latent in latents
            if latent.ndim == 2 + len(config.patch_size)
        )
        return conditioning["context"].shape[1] + sum(picture.tokens for picture in pictures)

    def exact(self, config: ComfyConfig) -> frozenset[str]:
        """Those that ComfyUI's class makes fp32 whatever type is chosen."""
        return config.exact

    def control_blocks(self, config: ComfyConfig) -> Mapping[str, range]:
        """No ControlNet is carried. Raises Refused."""
        raise Refused(
            f"ControlNet cannot be used with a parallel {config.kind} MODEL yet: remove it, or use Load Parallel FLUX for "
            "FLUX.1 and Load Diffusion Model for other models."
        )

    def build(self, config: ComfyConfig, stage: Stage) -> ComfyModel:
        """One stage of the model on the meta device."""
        base = config.base(UNCONVERTED)
        config.declaration.compute(base.diffusion_model)
        if config.two_of_each:
            _keep_two_of_each(base.diffusion_model, config.declaration)
        return ComfyModel(base, config.declaration, stage)


def make(described: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """ComfyUI's BaseModel on the meta device, its layers casting their weights to what they are given."""
    import comfy.ops

    class Operations(comfy.ops.manual_cast):  # type: ignore[misc]
        """ComfyUI's, whose linear layers have weights before any are loaded."""

        class Linear(comfy.ops.manual_cast.Linear):  # type: ignore[misc]
            """One with a loader of its own gets its weight when it is made."""

            _load_from_state_dict = nn.Linear._load_from_state_dict

    described.unet_config["dtype"] = dtype
    described.custom_operations = Operations
    base = described.get_model(dict(tensors), "", device=torch.device("meta"))
    load_buffers(base.diffusion_model)
    return base


def load_buffers(module: nn.Module) -> None:
    """Make parameters of the buffers that files have values for, such as SD 3's positions, so that they are loaded too."""
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.is_meta and name not in part._non_persistent_buffers_set:
                delattr(part, name)
                part.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def _under_comfyui_names(part: Checkpoint, described: Any) -> Checkpoint:
    """The file's tensors under the names that ComfyUI's loader gives them.

    Raises:
        Refused: the loader changes more than names.
    """
    tensors = part.meta_tensors()
    sources = {id(tensor): name for name, tensor in tensors.items()}
    renamed = described.process_unet_state_dict(dict(tensors))
    changed = [name for name, tensor in renamed.items() if id(tensor) not in sources]
    if changed:
        raise Refused(
            f"{part.path.name} has {changed[0]} in a layout that is not supported: choose a file in ComfyUI's own layout."
        )
    return replace(part, entries={name: part.entries[sources[id(tensor)]] for name, tensor in renamed.items()})


def _keep_two_of_each(module: nn.Module, declaration: Declaration) -> None:
    """Drop all blocks but the first two of each group, or, where they run in units, those of the first two units.

    A group of one block gets another like it; one of none stays empty. Of groups between the first and the last, which
    count as the last's, none is left.
    """
    units = declaration.units(module)[:2] if declaration.units else None
    for group in declaration.groups:
        blocks = list(module.get_submodule(group.path).children())
        if units is None and group in declaration.groups[1:-1]:
            kept = []
        elif units is None:
            kept = [*blocks, *copy.deepcopy(blocks[-1:])][:2]
        else:
            kept = blocks[: sum(path.startswith(f"{group.path}.") for unit in units for path in unit)]
        module.set_submodule(group.path, nn.ModuleList(kept))


def _not_computed(module: nn.Module) -> list[str]:
    """Buffers that come from no file and are on the meta device; empty ones are marks."""
    filed = module.state_dict().keys()
    return [name for name, buffer in module.named_buffers() if name not in filed and buffer.is_meta and buffer.numel()]


def _whole(name: str, parameter: Tensor) -> tuple[Piece, ...]:
    return (Piece(name, 0, parameter.shape[0], tuple(parameter.shape[1:])),)


def _shape(
    kind: str, module: nn.Module, declaration: Declaration, blocks: Sequence[Block], channels: int, dims: int
) -> ModelShape:
    """What plans go by. Of groups that come one after the other, the first counts as double blocks."""
    heads, head_dim = declaration.heads_of(module)
    units = blocks[-1].unit + 1
    first = declaration.groups[0]
    doubles = sum(block.group is first for block in blocks)
    if declaration.units or doubles == len(blocks):
        doubles = 0
    sizes = [sum(p.numel() for p in block.module.parameters()) for block in blocks]
    inside = sum(sizes)
    double = sum(sizes[:doubles])
    last = blocks[-1]
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
        token_weights=_token_weights(last) // len(last.group.streams),
        channels=channels * volume,
        joint_text=declaration.joint_text,
        embeds_whole=True,
    )


def _token_weights(block: Block) -> int:
    """Parameters of the layers that are applied to every token."""
    return sum(
        parameter.numel()
        for name, parameter in block.module.named_parameters()
        if parameter.ndim == 2 and not any(mark in name for mark in MODULATION)
    )

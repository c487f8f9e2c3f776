"""The family of all models of ComfyUI. A model with a declaration is parallelised over ranks; others run unsharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...declaration import Declaration
from ...diffusion import Value
from ...errors import Refused
from ...plan import ModelShape
from ...weights.files.checkpoint import Checkpoint
from ...weights.files.keymap import KeyMap, Piece
from ..declared import DECLARATIONS
from ..family import Conditioning, Stage
from ..inspection import check_tensors
from ..sequence_parallel.blocks import blocks_of, control_blocks
from ..sequence_parallel.picture import Picture, as_patch_size
from .config import ComfyConfig
from .importing import import_comfyui
from .input_checks import check_declared, check_unsharded
from .meta_model import UNCONVERTED, compute_buffers, missing_buffers, read_model
from .model import ComfyModel, UnshardedModel
from .plan_shape import plan_shape, reference_tokens, unsharded_shape
from .quantised_layers import pieces_of, quantise_layers
from .reduced import keep_two_of_each


class ComfyFamily:
    """A family that reads files as ComfyUI does and builds ComfyUI's own model.

    Args:
        declare: returns the declaration of a class in comfy.supported_models, given the class's name; None for a model that
            runs unsharded.
    """

    conditioning_names: frozenset[str] | None = None
    called_methods = frozenset({"process_timestep"})
    imports: tuple[str, ...] = ()

    def __init__(self, declare: Callable[[str], Declaration | None] = DECLARATIONS.get) -> None:
        self._declare = declare

    def inspect(self, checkpoint: Checkpoint) -> tuple[Checkpoint, ComfyConfig]:
        """Return the model's tensors under ComfyUI's names, and its configuration as ComfyUI detects it.

        Raises:
            Refused: ComfyUI does not know the model, or the file lacks tensors.
        """
        import_comfyui()
        detected = read_model(checkpoint)
        part, described, base = detected.part, detected.described, detected.base
        kind, module = type(described).__name__, base.diffusion_model
        declaration = self._declare(kind)
        compute_buffers(module, described, detected.tensors, detected.entries)
        if missing := missing_buffers(module):
            raise Refused(
                f"{part.path.name} is a {kind} model, whose {missing[0]} is not in the file and cannot be computed by "
                "this pack yet: use Load Diffusion Model."
            )
        dims, channels = base.latent_format.latent_dimensions, base.latent_format.latent_channels
        if declaration is None:
            parameters = sum(parameter.numel() for parameter in module.parameters())
            shape, declared = unsharded_shape(kind, parameters, channels), {"patch_size": (1,) * dims}
        else:
            channels = declaration.channels(module) or channels
            shape = plan_shape(kind, module, declaration, blocks_of(module, declaration), channels, dims)
            declared = _declared_sizes(base, declaration, channels, dims)
        exact = {key for key, parameter in module.named_parameters() if parameter.dtype == torch.float32}
        names = {key: whole_piece(key, parameter) for key, parameter in module.named_parameters()}
        quantised_entries = quantise_layers(module, part, detected.quantisation, described)
        plain = {key: names[key] for key, _ in module.named_parameters() if key not in quantised_entries}
        check_tensors(part, plain, kind, None if declaration is None else shape.hidden)
        model_part = replace(part, entries={key: part.entries[key] for key in plain} | quantised_entries)
        config = ComfyConfig(
            kind=kind,
            described=described,
            declaration=declaration,
            base_model=base,
            tensors=detected.tensors,
            entries=detected.entries,
            part=part,
            quantisation=detected.quantisation,
            shape=shape,
            keys=plain | pieces_of(quantised_entries),
            names=names,
            exact=frozenset(exact),
            latent_channels=channels,
            **declared,
        )
        return model_part, config

    def shape(self, config: ComfyConfig) -> ModelShape:
        """Return the model's size and limits, counted on the model itself."""
        return config.shape

    def token_rows(self, config: ComfyConfig, latent_shape: Sequence[int]) -> int:
        """Return the largest number of patches, which are rows of tokens or frames.

        A video packed with its sound and an unsharded model's latent cannot be cut.
        """
        if config.declaration is None or len(latent_shape) < 2 + config.latent_dims:
            return 1
        return Picture(tuple(latent_shape), config.patch_size).most_patches

    def image_tokens(self, config: ComfyConfig, latent_shape: Sequence[int]) -> int:
        """Return the number of tokens of one batch item's latent; without a declaration, its number of positions."""
        if config.declaration is None:
            return math.prod(latent_shape[2:])
        return Picture(tuple(latent_shape), config.patch_size).tokens

    def context_tokens(self, config: ComfyConfig, conditioning: Conditioning) -> int:
        """Return the number of tokens of the text and, in a model with a declaration, of the reference latents."""
        text = conditioning.get("context")
        tokens = 0 if text is None or text.ndim < 2 else text.shape[1]
        if config.declaration is None:
            return tokens
        return tokens + reference_tokens(conditioning, config.patch_size, config.declaration.references)

    def two_of_each(self, config: ComfyConfig) -> tuple[ComfyConfig, tuple[int, ...]]:
        """Return the configuration with the first two blocks of each kind, and the real numbers of blocks."""
        counts = tuple(count for count in (config.shape.double_blocks, config.shape.single_blocks) if count)
        return replace(config, two_of_each=True), counts

    def item_bytes(
        self, config: ComfyConfig, latent_shape: Sequence[int], conditioning: Conditioning, dtype: torch.dtype
    ) -> float:
        """Return ComfyUI's estimate of the bytes of an unsharded forward for one batch item; 0 for a model with a declaration."""
        if config.declaration is not None:
            return 0.0
        base, item_shape = config.base_model, [1, *latent_shape[1:]]
        base.manual_cast_dtype = dtype  # ComfyUI's estimate reads the compute dtype here
        shapes = {
            name.partition(".")[0]: [[1, *tensor.shape[1:]]] for name, tensor in conditioning.items() if tensor.ndim > 1
        }
        return float(base.memory_required(item_shape, cond_shapes=shapes))

    def check(
        self, config: ComfyConfig, latent: Tensor, conditioning: Conditioning, values: Mapping[str, Value]
    ) -> None:
        """Refuse a latent or text of the wrong kind, with the numbers, and conditioning that is declared as unsupported."""
        if config.declaration is None:
            check_unsharded(config, latent, conditioning)
        else:
            check_declared(config, config.declaration, latent, conditioning, values)

    def couples_rows(self, config: ComfyConfig, conditioning: Conditioning) -> str:
        """Return the declaration's reason, or "" without a declaration: a worker tries it (worker/requests/unsharded.py)."""
        return "" if config.declaration is None else config.declaration.couples_rows(conditioning)

    def keys(self, config: ComfyConfig) -> KeyMap:
        """Return the key map, in which each parameter is the file's tensor of the same name."""
        return config.keys

    def comfyui_keys(self, config: ComfyConfig) -> KeyMap:
        """Return the key map in which the weights of quantised layers are single tensors; `keys` has their parts."""
        return config.names

    def exact(self, config: ComfyConfig) -> frozenset[str]:
        """Return the names of the parameters that ComfyUI's class keeps in fp32, whichever dtype is chosen."""
        return config.exact

    def control_blocks(self, config: ComfyConfig) -> Mapping[str, range]:
        """Return the blocks after which a ControlNet's tensors are added.

        An unsharded model has none, because its own forward adds the tensors.
        """
        return config.control

    def build(self, config: ComfyConfig, stage: Stage) -> ComfyModel | UnshardedModel:
        """Return one stage of the model on the meta device."""
        base = config.base(UNCONVERTED)
        compute_buffers(base.diffusion_model, config.described, config.tensors, config.entries)
        quantise_layers(base.diffusion_model, config.part, config.quantisation, config.described)
        if config.declaration is None:
            return UnshardedModel(base)
        if config.two_of_each:
            keep_two_of_each(base.diffusion_model, config.declaration)
        return ComfyModel(base, config.declaration, stage)


def _declared_sizes(base: Any, declaration: Declaration, channels: int, dims: int) -> dict[str, Any]:
    """Return the fields of ComfyConfig that a declaration reads off the model."""
    module, text_width = base.diffusion_model, declaration.text_width(base.diffusion_model)
    return {
        "patch_size": as_patch_size(declaration.patch_size(module), dims),
        "concat_channels": _concat_channels(base, channels, dims),
        "text_widths": (text_width,) if isinstance(text_width, int) else text_width,
        "pooled_width": declaration.pooled_width(module),
        "sound": declaration.sound(module),
        "control": control_blocks(blocks_of(module, declaration), declaration),
        "methods": declaration.methods(module),
        "sigmas": declaration.sigmas(module),
    }


def _concat_channels(base: Any, channels: int, dims: int) -> int:
    """Return the number of channels of the mask and the picture that ComfyUI's class concatenates to a latent."""
    latent = torch.zeros(1, channels, *[1] * (dims - 2), 2, 2, device="meta")
    concat = base.concat_cond(noise=latent, latent_image=latent, device=latent.device)
    return 0 if concat is None else int(concat.shape[1])


def whole_piece(name: str, parameter: Tensor) -> Piece:
    """Return all rows of a tensor as the piece that makes a parameter of the same name."""
    rows = parameter.shape[0] if parameter.ndim else 1
    return Piece(name, 0, rows, tuple(parameter.shape[1:]))

"""The family of all models that ComfyUI knows and a declaration says how to spread."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...conditioning import packed_shapes
from ...declaration import Declaration, DistributedAttention, HeadParallelAttention, PrefixedAttention
from ...diffusion import Value
from ...errors import Refused
from ...plan import ModelShape
from ...plan.predict.operations import of_a_block
from ...plan.predict.profiles import copies_of
from ...weights.files.checkpoint import Checkpoint, TensorEntry
from ...weights.files.keymap import KeyMap, Piece
from ..declared import DECLARATIONS
from ..family import Conditioning, Stage
from ..inspection import check_tensors
from ..sequence_parallel.blocks import Block, attentions_of, blocks_of, control_blocks
from ..sequence_parallel.picture import Picture, as_patch_size
from .computed_buffers import CPU, compute_buffers, made_without_weights
from .detection import DAMAGE, detect, unmakable
from .file_values import file_values, named_values
from .importing import import_comfyui
from .latents import REFERENCE, check_sizes, reference_tokens
from .model import ComfyModel
from .quantised_layers import pieces_of, quantise_layers

META = torch.device("meta")
UNCONVERTED = torch.float16
"""The type in which models are built on the meta device; ComfyUI's classes make some parameters fp32 whatever is asked for."""

MOST_REPEATS = 3
"""So often a file is detected again after shapes have got sizes of 1 back."""

METHOD = "ref_latents_method"
"""The conditioning that says where references are laid."""

MODULATION = ("mod", "adaLN", "adaln", "norm")
"""In the names of layers that are applied once a call, not once a token."""


@dataclass(frozen=True)
class ComfyConfig:
    """A model as ComfyUI detects it.

    Attributes:
        kind: the name of its class in comfy.supported_models.
        described: an instance of that class.
        declaration: where its tokens are.
        tensors: the file's, on the meta device.
        entries: where those of the tensors lie that its class may look into.
        shape: what plans go by.
        patch_size: latent values that are one token, (frames,) height and width.
        latent_channels: those of the latent to sample.
        concat_channels: those that ComfyUI's class lays beside it.
        text_widths: the widths that text may have.
        pooled_width: the least width of pooled text.
        sound: the shape of the sound beside a video; see Declaration.
        part: the model's own tensors in the file.
        quantisation: of each quantised layer what the file says of it: its tensor `comfy_quant`.
        keys: of what ranks hold.
        names: of the whole weights that adapters change.
        exact: the parameters that ComfyUI's class makes fp32 whatever type is chosen.
        control: after which blocks each of a ControlNet's lists is added.
        methods: the ways to lay out references that it takes; all if empty.
        sigmas: whether it reads the sigmas of the call and of the run.
        two_of_each: drops all blocks but two of each kind, for timing.
    """

    kind: str
    described: Any
    declaration: Declaration
    tensors: Mapping[str, Tensor]
    entries: Mapping[str, TensorEntry]
    shape: ModelShape
    patch_size: tuple[int, ...]
    latent_channels: int
    concat_channels: int
    text_widths: tuple[int, ...]
    pooled_width: int
    sound: tuple[int | None, ...]
    part: Checkpoint
    quantisation: Mapping[str, Tensor]
    keys: KeyMap
    names: KeyMap
    exact: frozenset[str]
    control: Mapping[str, range]
    methods: Sequence[str]
    sigmas: bool
    two_of_each: bool = False

    def base(self, dtype: torch.dtype) -> Any:
        """ComfyUI's model on the meta device, its weights of a type."""
        return make(self.described, self.tensors, dtype, self.entries)


class ComfyFamily:
    """Reads files as ComfyUI does and builds ComfyUI's own model.

    Args:
        derived: the declaration of a model for whose class none is written.
    """

    takes: frozenset[str] | None = None
    asks = frozenset({"process_timestep"})
    imports: tuple[str, ...] = ()

    def __init__(self, derived: Declaration | None = None) -> None:
        self._derived = derived

    def inspect(self, checkpoint: Checkpoint) -> tuple[Checkpoint, ComfyConfig]:
        """The model's own tensors under ComfyUI's names, and what ComfyUI finds it to be.

        Raises:
            Refused: ComfyUI does not know the model, or it lacks tensors.
        """
        import_comfyui()
        name, detected = checkpoint.path.name, find(checkpoint)
        part, described, base = detected.part, detected.described, detected.base
        kind, module = type(described).__name__, base.diffusion_model
        declaration = self._derived or DECLARATIONS[kind]
        self._compute(module, declaration, described, detected.tensors, detected.entries)
        if missing := _not_computed(module):
            raise Refused(
                f"{name} is a {kind} model, whose {missing[0]} is not in the file and not known to this pack: update this "
                "pack, or use Load Diffusion Model."
            )
        blocks = blocks_of(module, declaration)
        channels, dims = declaration.channels(module), base.latent_format.latent_dimensions
        channels = channels or base.latent_format.latent_channels
        shape = plan_shape(kind, module, declaration, blocks, channels, dims)
        exact = {key for key, parameter in module.named_parameters() if parameter.dtype == torch.float32}
        names = {key: _whole(key, parameter) for key, parameter in module.named_parameters()}
        quantised_entries = quantise_layers(module, part, detected.quantisation, described)
        plain = {key: names[key] for key, _ in module.named_parameters() if key not in quantised_entries}
        check_tensors(part, plain, kind, shape.hidden)
        model_part = replace(part, entries={key: part.entries[key] for key in plain} | quantised_entries)
        config = ComfyConfig(
            kind=kind,
            described=described,
            declaration=declaration,
            tensors=detected.tensors,
            entries=detected.entries,
            shape=shape,
            patch_size=as_patch_size(declaration.patch_size(module), dims),
            latent_channels=channels,
            concat_channels=_concat_channels(base, channels, dims),
            text_widths=_as_tuple(declaration.text_width(module)),
            pooled_width=declaration.pooled_width(module),
            sound=declaration.sound(module),
            part=part,
            quantisation=detected.quantisation,
            keys=plain | pieces_of(quantised_entries),
            names=names,
            exact=frozenset(exact),
            control=control_blocks(blocks, declaration),
            methods=declaration.methods(module),
            sigmas=declaration.sigmas(module),
        )
        return model_part, config

    def shape(self, config: ComfyConfig) -> ModelShape:
        """Counted on the model itself."""
        return config.shape

    def token_rows(self, config: ComfyConfig, latent_shape: Sequence[int]) -> int:
        """Patches are rows of tokens, or frames. A video packed with its sound is not cut."""
        if len(latent_shape) < 2 + len(config.patch_size):
            return 1
        return Picture(tuple(latent_shape), config.patch_size).most_patches

    def image_tokens(self, config: ComfyConfig, latent_shape: Sequence[int]) -> int:
        """Tokens of one batch item's latent, by the patch size."""
        return Picture(tuple(latent_shape), config.patch_size).tokens

    def two_of_each(self, config: ComfyConfig) -> tuple[ComfyConfig, tuple[int, ...]]:
        """The first two blocks of each kind."""
        counts = tuple(count for count in (config.shape.double_blocks, config.shape.single_blocks) if count)
        return replace(config, two_of_each=True), counts

    def check(
        self, config: ComfyConfig, latent: Tensor, conditioning: Conditioning, values: Mapping[str, Value]
    ) -> None:
        """Refuse a latent or text of the wrong kind, with the numbers, and what is declared as refused."""
        shape, dims = list(latent.shape), len(config.patch_size)
        if latent.ndim != dims + 2 or latent.shape[1] != config.latent_channels:
            sizes = "height, width" if dims == 2 else "frames, height, width"
            raise Refused(
                f"the latent has the shape {shape} and {config.kind} takes [batch, {config.latent_channels}, {sizes}]: use the "
                "empty latent or the VAE that belongs to this model."
            )
        if min(shape) < 1:
            least = config.patch_size[-1] * config.described.latent_format.spacial_downscale_ratio
            raise Refused(
                f"the latent has the shape {shape}, which is empty: use a batch of at least 1 and at least {least} x "
                f"{least} pixels."
            )
        text = conditioning.get("context")
        if text is not None and text.ndim == 3 and text.shape[1] == 0:
            raise Refused(
                f"the conditioning's text has the shape {list(text.shape)} and at least one token is needed: encode a prompt."
            )
        if text is None or text.ndim != 3 or text.shape[2] not in config.text_widths:
            actual = "missing" if text is None else f"of the shape {list(text.shape)}"
            widths = " or ".join(map(str, config.text_widths))
            raise Refused(
                f"the conditioning's text is {actual} and {config.kind} takes [batch, tokens, {widths}]: use the text encoder "
                "that belongs to this model."
            )
        mask = conditioning.get("attention_mask") if config.declaration.takes_text_mask else None
        if mask is not None and mask.ndim == 2 and mask.shape[1] not in (1, text.shape[1]):
            raise Refused(
                f"the conditioning's attention_mask is for {mask.shape[1]} tokens and its text has {text.shape[1]}: encode the "
                "prompt again, or remove the node that changes one of them."
            )
        pooled = conditioning.get("y")
        if pooled is not None and pooled.shape[-1] < config.pooled_width:
            raise Refused(
                f"the conditioning's pooled text is {pooled.shape[-1]} wide and {config.kind} takes {config.pooled_width}: use "
                "the text encoders that belong to this model."
            )
        check_sizes(config.kind, config.declaration, Picture(tuple(shape), config.patch_size), conditioning)
        concat = conditioning.get("concat")
        if concat is not None and concat.shape[1] != config.concat_channels:
            raise Refused(
                f"the picture beside the latent, such as a first frame, has {concat.shape[1]} channels with its mask and "
                f"{config.kind} takes {config.concat_channels}: encode it with the VAE that belongs to this model."
            )
        for name, tensor in conditioning.items():
            base = name.split(".")[0]
            if base == REFERENCE and (tensor.shape[1] != config.latent_channels or min(tensor.shape) < 1):
                raise Refused(
                    f"a reference latent has the shape {list(tensor.shape)} and {config.kind} takes {config.latent_channels} "
                    "channels: encode the reference picture with the VAE that belongs to this model."
                )
            if base == config.declaration.concatenated_latent and tensor.shape[2:-1] != latent.shape[2:-1]:
                raise Refused(
                    f"the picture to edit is a latent {tensor.shape[-2]} high and the latent to sample is {latent.shape[-2]} "
                    "high: use the latent that the node gives which adds the picture (InstructPixToPixConditioning)."
                )
            if base in config.declaration.unsupported_conditioning:
                raise Refused(
                    f"{base} in the conditioning cannot be used with a parallel {config.kind} MODEL: "
                    f"{config.declaration.unsupported_conditioning[base]}, or use Load Diffusion Model."
                )
        method = values.get(METHOD)
        if method is not None and config.methods and method not in config.methods:
            raise Refused(
                f"the reference latents method {method} is not supported ({', '.join(config.methods)} are): set it in "
                "FluxKontextMultiReferenceLatentMethod."
            )
        _check_sound(config, packed_shapes(values))

    def couples_rows(self, config: ComfyConfig, conditioning: Conditioning) -> str:
        """What the model's declaration says of it."""
        return config.declaration.couples_rows(conditioning)

    def keys(self, config: ComfyConfig) -> KeyMap:
        """Each parameter is a tensor of its own name."""
        return config.keys

    def comfyui_keys(self, config: ComfyConfig) -> KeyMap:
        """As `keys`, but that weights are whole which ranks hold in parts."""
        return config.names

    def beside_tokens(self, config: ComfyConfig, conditioning: Conditioning) -> int:
        """The text, and every latent that is given as a reference."""
        more = config.declaration.references
        return conditioning["context"].shape[1] + reference_tokens(conditioning, config.patch_size, more)

    def exact(self, config: ComfyConfig) -> frozenset[str]:
        """Those that ComfyUI's class makes fp32 whatever type is chosen."""
        return config.exact

    def control_blocks(self, config: ComfyConfig) -> Mapping[str, range]:
        """After which blocks the declaration has a ControlNet's tensors added."""
        return config.control

    def build(self, config: ComfyConfig, stage: Stage) -> ComfyModel:
        """One stage of the model on the meta device."""
        base = config.base(UNCONVERTED)
        self._compute(base.diffusion_model, config.declaration, config.described, config.tensors, config.entries)
        quantise_layers(base.diffusion_model, config.part, config.quantisation, config.described)
        if config.two_of_each:
            keep_two_of_each(base.diffusion_model, config.declaration)
        return ComfyModel(base, config.declaration, stage)

    def _compute(
        self,
        module: nn.Module,
        declaration: Declaration,
        described: Any,
        tensors: Mapping[str, Tensor],
        entries: Mapping[str, TensorEntry],
    ) -> None:
        """Make what no file has: as its declaration says, or, where that was derived, as the class makes it."""
        if self._derived is None:
            declaration.computed_buffers(module)
        else:
            compute_buffers(module, described, tensors, entries)


@dataclass(frozen=True)
class Found:
    """What ComfyUI finds a file to be; fields are as ComfyConfig's, and `base` is its model on the meta device."""

    part: Checkpoint
    quantisation: Mapping[str, Tensor]
    described: Any
    tensors: Mapping[str, Tensor]
    entries: Mapping[str, TensorEntry]
    base: Any


def find(checkpoint: Checkpoint) -> Found:
    """Detect the model of a file and make it on the meta device.

    Raises:
        Refused: ComfyUI does not know the model, or cannot make it of these tensors.
    """
    detected = _find(checkpoint)
    for _ in range(MOST_REPEATS if checkpoint.drops_ones else 0):
        restored = with_ones(detected.part, dict(detected.base.diffusion_model.named_parameters()))
        if not restored:
            break
        entries = {name: restored.get(id(entry), entry) for name, entry in checkpoint.entries.items()}
        checkpoint = replace(checkpoint, entries=entries)
        detected = _find(checkpoint)  # once more: a size may be read off a shape that has its ones again
    return detected


def with_ones(part: Checkpoint, parameters: Mapping[str, Tensor]) -> dict[int, TensorEntry]:
    """Return the tensors, by identity, that are the model's but for sizes of 1, in as many dimensions as the model has.

    Sizes that are no 1 are the file's: where the model was made for others, it is detected anew.
    """
    changed = {}
    for name, entry in part.entries.items():
        shape, expected = entry.shape, tuple(parameters[name].shape) if name in parameters else entry.shape
        if shape == expected or entry.parts:
            continue
        sizes = [size for size in shape if size != 1]
        front = len(expected) - len(shape)
        if sizes == [size for size in expected if size != 1]:
            changed[id(entry)] = replace(entry, shape=expected)
        elif front > 0 and expected[:front] == (1,) * front:
            changed[id(entry)] = replace(entry, shape=(1,) * front + shape)
    return changed


def _find(checkpoint: Checkpoint) -> Found:
    part, quantisation, described = detect(checkpoint)
    tensors, entries = part.meta_tensors(), part.entries
    try:
        base = make(described, tensors, UNCONVERTED, entries)
    except DAMAGE as error:
        # Some classes are made of more than their diffusion model, such as the embedders of Stable Audio.
        tensors, entries = checkpoint.meta_tensors() | tensors, {**checkpoint.entries, **entries}
        try:
            base = make(described, tensors, UNCONVERTED, entries)
        except DAMAGE:
            raise unmakable(part, error) from None
    return Found(part, quantisation, described, tensors, entries, base)


def make(
    described: Any,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    entries: Mapping[str, TensorEntry] = MappingProxyType({}),
) -> Any:
    """Make ComfyUI's BaseModel on the meta device, its layers casting their weights to what they are given.

    Args:
        tensors: the file's, on the meta device.
        entries: where those of the tensors lie that the class may look into.
    """
    import comfy.ops

    class ComfyOperations(comfy.ops.manual_cast):  # type: ignore[misc]
        """ComfyUI's layers, with linear layers that have a weight before any weights are loaded."""

        class LinearWithWeight(comfy.ops.manual_cast.Linear):  # type: ignore[misc]
            """A linear layer that makes its weight in its constructor, as a layer with a loader of its own does."""

            _load_from_state_dict = nn.Linear._load_from_state_dict

        Linear = LinearWithWeight

    described.unet_config["dtype"] = dtype
    described.custom_operations = ComfyOperations
    try:
        with file_values(named_values(tensors, entries)):
            base = described.get_model(dict(tensors), "", device=META)
    except RuntimeError as error:  # torch's own, also where it is a kind of it
        if "meta tensor" not in str(error):
            raise
        with file_values(named_values(tensors, entries)):
            base = made_without_weights(lambda: described.get_model(dict(tensors), "", device=CPU))
    load_buffers(base.diffusion_model, tensors)
    return base


def keep_type(module: nn.Module, dtype: torch.dtype) -> None:
    """Have modules that keep what type their weights have keep this one: some compute in it, such as Z-Image's in pixels."""
    for part in module.modules():
        if vars(part).get("dtype") is UNCONVERTED:
            vars(part)["dtype"] = dtype


def make_in_memory(described: Any, tensors: Mapping[str, Tensor], entries: Mapping[str, TensorEntry]) -> Any:
    """ComfyUI's BaseModel in fp32 on the CPU, its weights still to be filled: memory that nothing is written to is not taken."""
    import comfy.ops

    described.unet_config["dtype"] = torch.float32
    described.manual_cast_dtype = None
    described.custom_operations = comfy.ops.disable_weight_init
    with file_values(named_values(tensors, entries)):
        return described.get_model(dict(tensors), "", device=torch.device("cpu"))


def load_buffers(module: nn.Module, tensors: Container[str]) -> None:
    """Make parameters of the buffers that files have values for, so that they are loaded too.

    Such as SD 3's positions, which are on the meta device, and MiniMax-H3's frequencies, which its class makes elsewhere. One
    without values is a mark, and stays: Chroma Radiance's `__x0__`.
    """
    for prefix, part in module.named_modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            filed = f"{prefix}.{name}".lstrip(".") in tensors or buffer.is_meta
            if filed and buffer.numel() and name not in part._non_persistent_buffers_set:
                delattr(part, name)
                part.register_parameter(name, nn.Parameter(buffer.to("meta"), requires_grad=False))


def keep_two_of_each(module: nn.Module, declaration: Declaration) -> None:
    """Drop all blocks but the first two of each group, or, where they run in units, those of the first two units.

    A group of one block gets another like it; one of none stays empty. Of groups between the first and the last, which
    count as the last's, none is left.
    """
    units = declaration.units(module)[:2] if declaration.units else None
    for group in declaration.groups:
        if not isinstance(module.get_submodule(group.path), nn.ModuleList):  # a block by itself
            continue
        blocks = list(module.get_submodule(group.path).children())
        if units is None and group in declaration.groups[1:-1]:
            members = []
        elif units is None:
            members = [*blocks, *copy.deepcopy(blocks[-1:])][:2]
        else:
            members = blocks[: sum(path.startswith(f"{group.path}.") for unit in units for path in unit)]
        module.set_submodule(group.path, nn.ModuleList(members))


def _not_computed(module: nn.Module) -> list[str]:
    """Buffers that come from no file and are on the meta device; empty ones are marks."""
    filed = module.state_dict().keys()
    return [name for name, buffer in module.named_buffers() if name not in filed and buffer.is_meta and buffer.numel()]


def _concat_channels(base: Any, channels: int, dims: int) -> int:
    """How many channels ComfyUI's class lays beside a latent of so many, its mask's and those of no picture."""
    latent = torch.zeros(1, channels, *[1] * (dims - 2), 2, 2, device="meta")
    concat = base.concat_cond(noise=latent, latent_image=latent, device=latent.device)
    return 0 if concat is None else int(concat.shape[1])


def _check_sound(config: ComfyConfig, shapes: Sequence[Sequence[int]]) -> None:
    """Refuse sound of the wrong kind beside a video, or none where the model takes both.

    Args:
        shapes: of the latents that are packed in one; none stands for a video alone.
    """
    if not shapes and not config.declaration.sound_optional:
        raise Refused(
            f"the latent holds a video alone and {config.kind} takes a video and its sound: use the empty latent for both that "
            "belongs to this model."
        )
    if shapes and not _fits(shapes[1:], config.sound):
        actual = " and ".join(str(list(shape)) for shape in shapes[1:])
        sizes = ", ".join("length" if size is None else str(size) for size in config.sound)
        takes = f"[batch, {sizes}]" if sizes else "none"
        raise Refused(
            f"the latent's sound has the shape {actual} and {config.kind} takes {takes}: use the empty latent that belongs to "
            "this model."
        )
    if shapes and shapes[0][0] > 1 and config.declaration.no_batches:
        raise Refused(
            f"the latent is a batch of {shapes[0][0]} and {config.kind} makes one video at a time: use batch_size 1, or queue "
            "the prompt again."
        )


def _fits(shapes: Sequence[Sequence[int]], sound: Sequence[int | None]) -> bool:
    """Whether a sound's shape is as declared."""
    ((_, *sizes), *more_shapes) = shapes
    return (
        not more_shapes
        and len(sizes) == len(sound)
        and all(expected in (None, size) for expected, size in zip(sound, sizes, strict=True))
    )


def _as_tuple(width: int | tuple[int, ...]) -> tuple[int, ...]:
    return (width,) if isinstance(width, int) else width


def _whole(name: str, parameter: Tensor) -> Piece:
    return Piece(name, 0, parameter.shape[0], tuple(parameter.shape[1:]))


def plan_shape(
    kind: str, module: nn.Module, declaration: Declaration, blocks: Sequence[Block], channels: int, dims: int
) -> ModelShape:
    """What plans go by. Of groups that come one after the other, the first counts as double blocks."""
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
    spread = [attention for block in blocks for attention in _spread_attentions(block)]
    kv_heads = max((attention.kv_heads or heads for attention in spread), default=heads)
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
        attentions=len(spread) / units,
        whole_picture=declaration.whole_picture,
        double_operations=double_operations // doubles if doubles else 0,
        single_operations=(sum(operations) - double_operations) // (units - doubles),
        kv_heads=0 if kv_heads == heads else kv_heads,
    )


def _token_layers(block: Block) -> dict[str, Tensor]:
    """The weights, `[out, in]`, of the layers that are applied to every token."""
    return {
        name: parameter
        for name, parameter in block.module.named_parameters()
        if parameter.ndim == 2 and not any(part in name for part in MODULATION)
    }


def _token_weights(block: Block) -> float:
    """Parameters that multiply a token; text that is in the sequence has some of its own."""
    if block.group.active_weights:
        return block.group.active_weights * sum(parameter.numel() for parameter in block.module.parameters())
    kinds = {type(block.group.streams[name]) for name in block.group.returns}
    return sum(weight.numel() for weight in _token_layers(block).values()) / len(kinds)


def _copies(blocks: Sequence[Block], hidden: int) -> float:
    """`ModelShape.copies` as declared, or by the widest layers of any block."""
    if declared := max(block.group.activation_copies for block in blocks):
        return declared
    layers = {f"{block.path}.{name}": weight.shape for block in blocks for name, weight in _token_layers(block).items()}
    widths_in, widths_out = {width for _, width in layers.values()}, {width for width, _ in layers.values()}
    siblings = Counter((name.rsplit(".", 2)[0], width) for name, (width, _) in layers.items())
    pairs = {width for (_, width), count in siblings.items() if count > 1} | {width // 2 for width in widths_out}
    gated = max((width for width in pairs & widths_in if width > hidden), default=0)
    return copies_of(hidden, max(widths_in), max(widths_out), gated)


def _spread_attentions(block: Block) -> list[DistributedAttention | HeadParallelAttention | PrefixedAttention]:
    attentions = attentions_of(block.group, block.module)
    return [
        attention
        for attention in attentions
        if isinstance(attention, DistributedAttention | HeadParallelAttention | PrefixedAttention)
    ]

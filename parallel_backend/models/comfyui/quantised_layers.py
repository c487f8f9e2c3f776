"""Layers with quantised weights: ComfyUI's own operations, on bytes that the engine holds.

ComfyUI's loader makes such a layer's weight, on the meta device, from the file's `comfy_quant` and shapes. What it is made
of becomes parameters of one dimension, which are read, sharded and moved like all others, and it is put together again
each time ComfyUI's code asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import Refused
from ...weights.files.checkpoint import Checkpoint, TensorEntry
from ...weights.files.keymap import Piece
from ...weights.formats import PLAIN
from ...weights.layers.quantised import PARTS, QuantisedParts
from .features.lora import merging_dtype, seed_of
from .quantisation import settings_of

META = torch.device("meta")

PACKED = "convrot_w4a4"
"""The format of two values a byte."""

ROWS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
"""Formats of a value in each place, with a scale for all or for each row."""

BLOCKS = {"nvfp4": 16, "mxfp8": 32}
"""Values of a row that share a scale, in formats where blocks have scales; these lie in tiles of 128 x 4."""


class OfParts(nn.Module):
    """A linear layer of ComfyUI's mixed precision whose tensors are made of `parts` where they are asked for.

    `kinds` says what the file's name of each part stands for: its type and shape. `inside` are the tensors that the weight
    consists of, by ComfyUI's attribute, and `frame` whatever else it is.
    """

    parts: QuantisedParts
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    compute_dtype: torch.dtype
    weight_class: Any
    inside: dict[str, str]
    frame: dict[str, Any]
    runs_as_operator = True

    def take_apart(self) -> None:
        """Make parts of the weight that ComfyUI's loader has made on the meta device, and of the input's scales."""
        weight = self.weight
        names = {id(tensor): name for name, tensor in weight.state_dict("weight").items()}
        attributes, self.frame = weight.__tensor_flatten__()
        tensors_by_attribute = {attribute: getattr(weight, attribute) for attribute in attributes}
        self.weight_class = type(weight)
        self.inside = {attribute: names[id(tensor)] for attribute, tensor in tensors_by_attribute.items()}
        tensors = {names[id(tensor)]: tensor for tensor in tensors_by_attribute.values()}
        tensors |= {
            name: tensor for name, tensor in self.named_parameters(recurse=False) if name not in ("weight", "bias")
        }
        self.kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        for name in ("weight", *tensors):
            self._parameters.pop(name, None)
        self.compute_dtype = weight.dtype
        self.parts = QuantisedParts()
        for name, (dtype, shape) in self.kinds.items():
            flat = torch.empty(math.prod(shape), dtype=dtype, device=META)
            self.parts.register_parameter(name, nn.Parameter(flat, requires_grad=False))

    def __getattr__(self, name: str) -> Any:
        """What ComfyUI's code asks for: the weight, or the scale of inputs."""
        kinds = self.__dict__.get("kinds", {})
        if name == "weight" and kinds:
            return self.weight_of(self.parts._parameters, self.compute_dtype)
        if name in kinds:
            return self.parts.get_parameter(name).view(kinds[name][1])
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """ComfyUI's, which asks for the weight again and again: it is put together once."""
        self.__dict__["weight"] = self.weight
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            del self.__dict__["weight"]

    def weight_of(self, parts: Mapping[str, Any], dtype: torch.dtype) -> Any:
        """ComfyUI's quantised tensor, whose values are expanded to a type."""
        tensors = {attribute: parts[name].view(self.kinds[name][1]) for attribute, name in self.inside.items()}
        fixed = self.frame["non_tensor_fields"] | {"orig_dtype": dtype}
        return self.weight_class.__tensor_unflatten__(tensors, self.frame | {"non_tensor_fields": fixed}, None, None)

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight's values `[rows, columns]`, in the type in which ComfyUI applies LoRA."""
        expanded: Tensor = self.weight_of(parts, merging_dtype(False, parts["weight"].device)).dequantize()
        return expanded

    def quantised(self, parts: Mapping[str, Tensor], values: Tensor, name: str) -> dict[str, Tensor]:
        """The parts of a weight of other values: scales found anew, rounding drawn by the weight's name."""
        old = self.weight_of(parts, self.compute_dtype)
        seed = seed_of(name)
        new = old.requantize_from_float(values, scale="recalculate", stochastic_rounding=seed, inplace_ops=True)
        new_parts = {}
        for part, tensor in new.state_dict("weight").items():
            dtype, shape = self.kinds[part]
            new_parts[part] = (
                tensor.to(dtype).expand(shape).reshape(-1)
            )  # one scale where the file has one for each row
        return new_parts


def quantise_layers(
    module: nn.Module, checkpoint: Checkpoint, quantisation: Mapping[str, Tensor], described: Any
) -> dict[str, TensorEntry]:
    """Put layers that multiply as `quantisation` says, by layer, in the place of a model's, on the meta device.

    Returns:
        The file's tensors that they are made of, as they are read: by the names of their parts.

    Raises:
        Refused: ComfyUI cannot do it, or tensors are missing or of other shapes.
    """
    import comfy.ops

    operations = comfy.ops.pick_operations(None, torch.float32, model_config=described)

    class QuantisedLinear(OfParts, operations.Linear):  # type: ignore[misc,name-defined]
        """ComfyUI's linear layer, with a weight of several tensors."""

        _apply = nn.Module._apply

    entries: dict[str, TensorEntry] = {}
    for layer, comfy_quant in quantisation.items():
        if f"{layer}.weight" not in checkpoint.entries:
            continue  # those of text encoders are in the same table
        quantised = _load(QuantisedLinear, module, checkpoint, layer, comfy_quant)
        module.set_submodule(layer, quantised)
        for part, (dtype, _) in quantised.kinds.items():
            name = f"{layer}.{part}"
            entries[f"{layer}.{PARTS}.{part}"] = _entry(checkpoint.entries[name], dtype)
    return entries


def _load(kind: type[OfParts], module: nn.Module, checkpoint: Checkpoint, layer: str, comfy_quant: Tensor) -> OfParts:
    """A layer as ComfyUI's loader makes it of shapes."""
    from comfy.quant_ops import QUANT_ALGOS

    path = checkpoint.path.name
    settings = settings_of(checkpoint, layer, comfy_quant)
    if settings["format"] not in QUANT_ALGOS:
        raise Refused(
            f"{path} holds {layer}.weight as {settings['format']}, which this ComfyUI does not know ({', '.join(QUANT_ALGOS)} "
            "it does): update ComfyUI, or choose another file."
        )
    try:
        old = module.get_submodule(layer)
    except AttributeError:
        old = None
    if not isinstance(old, nn.Linear):
        raise Refused(
            f"{path} holds {layer} quantised, which is supported for linear layers only: choose another file."
        )
    layer_module = kind(old.in_features, old.out_features, old.bias is not None, device=META, dtype=torch.float32)
    if old.bias is not None:
        layer_module.bias = old.bias
    state = {
        name.removeprefix(f"{layer}."): torch.empty(entry.shape, dtype=entry.dtype, device=META)
        for name, entry in checkpoint.entries.items()
        if name.rpartition(".")[0] == layer and not name.endswith(".bias")
    }
    try:
        layer_module.load_state_dict(state | {"comfy_quant": comfy_quant}, strict=False)
        layer_module.take_apart()
        _check_shapes(layer_module, settings)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Refused(
            f"{path} holds {layer}.weight as {settings['format']} in a way that ComfyUI does not take ({error}): choose another "
            "file."
        ) from None
    return layer_module


def _check_shapes(layer: OfParts, settings: Mapping[str, Any]) -> None:
    """Raises ValueError where a weight or its scales do not have the sizes that its format gives a layer of this size.

    Those of a format that this pack has not heard of are as ComfyUI takes them.
    """
    from comfy.quant_ops import get_layout_class

    if settings["format"] not in (PACKED, *ROWS, *BLOCKS):
        return

    layout = get_layout_class(layer.frame["layout_cls"])
    rows, columns = layer.frame["non_tensor_fields"]["orig_shape"]
    expected: tuple[int, ...] = (rows, columns)
    if settings["format"] == PACKED:
        expected = (rows, columns // 2)
    elif settings["format"] in BLOCKS:
        expected = tuple(layout.get_storage_shape((rows, columns)))
        scales = (-(-rows // 128) * 128, -(-columns // (4 * BLOCKS[settings["format"]])) * 4)
        if layer.kinds["weight_scale"][1] != scales:
            raise ValueError(
                f"scales of the shape {list(layer.kinds['weight_scale'][1])} where {list(scales)} is needed"
            )
    scale = layer.kinds["weight_scale"][1] if settings["format"].startswith("float8") else ()
    if math.prod(scale) not in (1, rows):
        raise ValueError(f"scales of the shape {list(scale)} where one, or one for each of {rows} rows, is needed")
    weight = layer.kinds["weight"][1]
    if weight != expected:
        raise ValueError(f"a shape of {list(weight)} where {list(expected)} is needed")


def _entry(entry: TensorEntry, dtype: torch.dtype) -> TensorEntry:
    assert entry.dtype is not None
    storage = entry.storage if entry.dtype.is_floating_point else PLAIN[dtype]  # bytes may be stored as integers
    return replace(entry, storage=storage, shape=(math.prod(entry.shape),), as_stored=True)


def pieces_of(entries: Mapping[str, TensorEntry]) -> dict[str, Piece]:
    """Each part is a tensor of its own name."""
    return {name: Piece(name, 0, entry.shape[0], ()) for name, entry in entries.items()}

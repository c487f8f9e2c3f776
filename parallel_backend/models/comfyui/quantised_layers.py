"""Layers with quantised weights: ComfyUI's own operations on bytes that the worker's engine holds.

ComfyUI's loader makes the weight of a quantised layer, on the meta device, from the file's `comfy_quant` and shapes. The
tensors of the weight become one-dimensional parameters, which are read, sharded and moved like all others. The weight is
assembled again each time ComfyUI's code asks for it.
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
"""The format with two values in a byte."""

ROWS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
"""Formats with one value per element, and one scale for the weight or one for each row."""

BLOCKS = {"nvfp4": 16, "mxfp8": 32}
"""The number of values of a row that share a scale, for formats with scales of blocks. The scales lie in tiles of 128 x 4."""


class OfParts(nn.Module):
    """A linear layer of ComfyUI's mixed precision whose weight is assembled from `parts` when code asks for it.

    Attributes:
        parts: the one-dimensional parameters, by the file's names.
        kinds: the dtype and shape of each part.
        compute_dtype: the dtype to which the weight's values are expanded.
        weight_class: ComfyUI's class of the weight, a tensor subclass.
        inside: the names of the parts that the weight consists of, by the attribute of ComfyUI's class.
        frame: the weight's other fields, as `__tensor_flatten__` returns them.
    """

    parts: QuantisedParts
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    compute_dtype: torch.dtype
    weight_class: Any
    inside: dict[str, str]
    frame: dict[str, Any]
    runs_as_operator = True

    def take_apart(self) -> dict[str, Tensor]:
        """Split the weight, which ComfyUI's loader has made on the meta device, and the input's scales into parts.

        Returns:
            The loader's tensors, by the names of the parts.
        """
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
        return tensors

    def __getattr__(self, name: str) -> Any:
        """Return the weight or the scale of inputs, which are no parameters of the layer itself."""
        kinds = self.__dict__.get("kinds", {})
        if name == "weight" and kinds:
            return self.weight_of(self.parts._parameters, self.compute_dtype)
        if name in kinds:
            return self.parts.get_parameter(name).view(kinds[name][1])
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run ComfyUI's forward with the weight assembled once, because the forward reads it several times."""
        self.__dict__["weight"] = self.weight
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            del self.__dict__["weight"]

    def weight_of(self, parts: Mapping[str, Any], dtype: torch.dtype) -> Any:
        """Return ComfyUI's quantised tensor, made of `parts`, whose values are expanded to `dtype`."""
        tensors = {attribute: parts[name].view(self.kinds[name][1]) for attribute, name in self.inside.items()}
        fixed = self.frame["non_tensor_fields"] | {"orig_dtype": dtype}
        return self.weight_class.__tensor_unflatten__(tensors, self.frame | {"non_tensor_fields": fixed}, None, None)

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the weight's values `[rows, columns]`, in the dtype in which ComfyUI applies LoRA."""
        expanded: Tensor = self.weight_of(parts, merging_dtype(False, parts["weight"].device)).dequantize()
        return expanded

    def quantised(self, parts: Mapping[str, Tensor], values: Tensor, name: str) -> dict[str, Tensor]:
        """Return the parts of a weight with new values. Scales are recomputed; the weight's name seeds the random rounding."""
        old = self.weight_of(parts, self.compute_dtype)
        seed = seed_of(name)
        new = old.requantize_from_float(values, scale="recalculate", stochastic_rounding=seed, inplace_ops=True)
        new_parts = {}
        for part, tensor in new.state_dict("weight").items():
            dtype, shape = self.kinds[part]
            new_parts[part] = (
                tensor.to(dtype).expand(shape).reshape(-1)
            )  # repeat a single scale if the file has one for each row
        return new_parts


def quantise_layers(
    module: nn.Module, checkpoint: Checkpoint, quantisation: Mapping[str, Tensor], described: Any
) -> dict[str, TensorEntry]:
    """Replace layers of a model by quantised ones, on the meta device.

    Args:
        quantisation: the file's tensor `comfy_quant` of each quantised layer.

    Returns:
        The entries of the file's tensors that the layers consist of, by the names of their parts.

    Raises:
        Refused: ComfyUI does not support it, or tensors are missing or have other shapes.
    """
    import comfy.ops

    operations = comfy.ops.pick_operations(None, torch.float32, model_config=described)

    class QuantisedLinear(OfParts, operations.Linear):  # type: ignore[misc,name-defined]
        """ComfyUI's linear layer, with a weight of several tensors."""

        _apply = nn.Module._apply

    entries: dict[str, TensorEntry] = {}
    for layer, comfy_quant in quantisation.items():
        if f"{layer}.weight" not in checkpoint.entries:
            continue  # the table also has the layers of text encoders
        quantised = _load(QuantisedLinear, module, checkpoint, layer, comfy_quant)
        module.set_submodule(layer, quantised)
        for part, (dtype, _) in quantised.kinds.items():
            name = f"{layer}.{part}"
            entries[f"{layer}.{PARTS}.{part}"] = entry_of_part(checkpoint.entries[name], dtype)
    return entries


def _load(kind: type[OfParts], module: nn.Module, checkpoint: Checkpoint, layer: str, comfy_quant: Tensor) -> OfParts:
    """Return a quantised layer as ComfyUI's loader makes it from the shapes of the file's tensors."""
    from comfy.quant_ops import QUANT_ALGOS

    path = checkpoint.path.name
    settings = settings_of(checkpoint, layer, comfy_quant)
    if settings["format"] not in QUANT_ALGOS:
        raise Refused(
            f"{path} holds {layer}.weight as {settings['format']}, which this ComfyUI does not support (it supports "
            f"{', '.join(QUANT_ALGOS)}): update ComfyUI, or choose another file."
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
            f"{path} holds {layer}.weight as {settings['format']} in a form that ComfyUI cannot load ({error}): "
            "choose another file."
        ) from None
    return layer_module


def _check_shapes(layer: OfParts, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a weight or its scales do not have the shapes that the format requires for a layer of this size.

    The shapes of other formats are left to ComfyUI.
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


def entry_of_part(entry: TensorEntry, dtype: torch.dtype) -> TensorEntry:
    """Return the entry of a part of one dimension, given the file's tensor."""
    assert entry.dtype is not None
    storage = entry.storage if entry.dtype.is_floating_point else PLAIN[dtype]  # bytes may be stored as integers
    return replace(entry, storage=storage, shape=(math.prod(entry.shape),), as_stored=True)


def pieces_of(entries: Mapping[str, TensorEntry]) -> dict[str, Piece]:
    """Return the key map of parts, in which each part is the tensor of the same name."""
    return {name: Piece(name, 0, entry.shape[0], ()) for name, entry in entries.items()}

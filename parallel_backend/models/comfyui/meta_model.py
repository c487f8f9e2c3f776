"""ComfyUI's model of a file on the meta device: class, parameters and buffers, without the weights' values."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...weights.files.checkpoint import Checkpoint, TensorEntry
from .detection import DAMAGE, detect, unmakable
from .file_values import file_values, named_values

CPU = torch.device("cpu")
META = torch.device("meta")

UNCONVERTED = torch.float16
"""The dtype in which models are built on the meta device. ComfyUI's classes make some parameters fp32 in any case."""

MOST_REPEATS = 3
"""Largest number of times that a file is detected again after dimensions of size 1 were restored."""


@dataclass(frozen=True)
class DetectedModel:
    """A file's model as ComfyUI detects it.

    Attributes:
        part: the model's own tensors in the file.
        quantisation: the file's tensor `comfy_quant` of each quantised layer.
        described: an instance of its class in comfy.supported_models.
        tensors: the file's tensors, on the meta device.
        entries: the entries of the tensors whose values the class may read.
        base: ComfyUI's BaseModel on the meta device.
    """

    part: Checkpoint
    quantisation: Mapping[str, Tensor]
    described: Any
    tensors: Mapping[str, Tensor]
    entries: Mapping[str, TensorEntry]
    base: Any


def read_model(checkpoint: Checkpoint) -> DetectedModel:
    """Detect the model of a file and make it on the meta device.

    Raises:
        Refused: ComfyUI does not know the model, or cannot make it of these tensors.
    """
    detected = _read(checkpoint)
    for _ in range(MOST_REPEATS if checkpoint.drops_ones else 0):
        restored = with_ones(detected.part, dict(detected.base.diffusion_model.named_parameters()))
        if not restored:
            break
        entries = {name: restored.get(id(entry), entry) for name, entry in checkpoint.entries.items()}
        checkpoint = replace(checkpoint, entries=entries)
        detected = _read(checkpoint)  # the detection may read a size from a restored shape
    return detected


def with_ones(part: Checkpoint, parameters: Mapping[str, Tensor]) -> dict[int, TensorEntry]:
    """Return the entries that differ from the model's parameters only by dimensions of size 1, with these restored.

    The keys are the `id`s of the old entries. All other sizes are the file's. If the model was made for other sizes, it is
    detected again.
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


def _read(checkpoint: Checkpoint) -> DetectedModel:
    part, quantisation, described = detect(checkpoint)
    tensors, entries = part.meta_tensors(), part.entries
    try:
        base = make_model(described, tensors, UNCONVERTED, entries)
    except DAMAGE as error:
        # Some classes need more than their diffusion model, such as the embedders of Stable Audio.
        tensors, entries = checkpoint.meta_tensors() | tensors, {**checkpoint.entries, **entries}
        try:
            base = make_model(described, tensors, UNCONVERTED, entries)
        except DAMAGE:
            raise unmakable(part, error) from None
    return DetectedModel(part, quantisation, described, tensors, entries, base)


def make_model(
    described: Any,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    entries: Mapping[str, TensorEntry] = MappingProxyType({}),
) -> Any:
    """Make ComfyUI's BaseModel on the meta device, with layers that cast their weights to the dtype of their input.

    Args:
        described: an instance of the model's class in comfy.supported_models.
        tensors: the file's tensors, on the meta device.
        entries: the entries of the tensors whose values the class may read.
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
    except RuntimeError as error:  # torch raises this class or a subclass for a meta tensor
        if "meta tensor" not in str(error):
            raise
        with file_values(named_values(tensors, entries)):
            base = _without_weights(lambda: described.get_model(dict(tensors), "", device=CPU))
    load_buffers(base.diffusion_model, tensors)
    return base


def keep_type(module: nn.Module, dtype: torch.dtype) -> None:
    """Set the dtype on modules that store the dtype of their weights. Some compute in it, such as Z-Image's for pixels."""
    for part in module.modules():
        if vars(part).get("dtype") is UNCONVERTED:
            vars(part)["dtype"] = dtype


def make_in_memory(described: Any, tensors: Mapping[str, Tensor], entries: Mapping[str, TensorEntry]) -> Any:
    """Return ComfyUI's BaseModel in fp32 on the CPU with uninitialised weights, which occupy no memory until they are written."""
    import comfy.ops

    described.unet_config["dtype"] = torch.float32
    described.manual_cast_dtype = None
    described.custom_operations = comfy.ops.disable_weight_init
    with file_values(named_values(tensors, entries)):
        return described.get_model(dict(tensors), "", device=CPU)


def load_buffers(module: nn.Module, tensors: Container[str]) -> None:
    """Turn the buffers that files have values for into parameters, so that they are loaded too.

    Examples are SD 3's positions, which are on the meta device, and MiniMax-H3's frequencies, which its class makes elsewhere.
    An empty buffer is a mark and stays, such as Chroma Radiance's `__x0__`.
    """
    for prefix, part in module.named_modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            filed = f"{prefix}.{name}".lstrip(".") in tensors or buffer.is_meta
            if filed and buffer.numel() and name not in part._non_persistent_buffers_set:
                delattr(part, name)
                part.register_parameter(name, nn.Parameter(buffer.to("meta"), requires_grad=False))


def missing_buffers(module: nn.Module) -> list[str]:
    """Return the names of buffers and of tensors in plain attributes that are on the meta device and that no file holds.

    Empty tensors are marks and are left out.
    """
    filed = module.state_dict().keys()
    plain = (
        (f"{path}.{name}".lstrip("."), value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor)
    )
    return [
        name
        for name, tensor in chain(module.named_buffers(), plain)
        if name not in filed and tensor.is_meta and tensor.numel()
    ]


def compute_buffers(
    module: nn.Module, described: Any, tensors: Mapping[str, Tensor], entries: Mapping[str, TensorEntry]
) -> None:
    """Compute the values of a meta module's missing buffers, in fp32, by making the model once more without weights.

    Args:
        described: the instance of comfy.supported_models' class that the module was made with.
        tensors: the file's tensors that the module was made from.
        entries: the entries of the tensors whose values the class may read.
    """
    missing = missing_buffers(module)
    if not missing:
        return
    dtype = described.unet_config["dtype"]
    described.unet_config["dtype"] = torch.float32
    try:
        with file_values(named_values(tensors, entries)), _WithoutWeights():
            computed = described.get_model(dict(tensors), "", device=CPU).diffusion_model
    finally:
        described.unet_config["dtype"] = dtype
    for name in missing:
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, getattr(computed.get_submodule(owner), last))


def _without_weights(make: Callable[[], Any]) -> Any:
    """Return ComfyUI's BaseModel on the meta device, for a class whose constructor reads values, such as ACE-Step 1.5's."""
    with _WithoutWeights():
        base = make()
    for part in base.diffusion_model.modules():
        for name, parameter in part.named_parameters(recurse=False):
            part._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to("meta")
    return base


class _WithoutWeights(TorchFunctionMode):
    """A function mode that creates uninitialised tensors (torch.empty), which are a model's weights, on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)

"""What a class of ComfyUI's computes when it is made and no file has, such as the frequencies of positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...weights.files.entry import TensorEntry
from .file_values import file_values, named_values

CPU = torch.device("cpu")


class _WithoutWeights(TorchFunctionMode):
    """Has memory that is only asked for, which is weights', on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def made_without_weights(make: Callable[[], Any]) -> Any:
    """ComfyUI's BaseModel on the meta device, of a class that looks at values while it is made, as ACE-Step 1.5's does."""
    with _WithoutWeights():
        base = make()
    for part in base.diffusion_model.modules():
        for name, parameter in part.named_parameters(recurse=False):
            part._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to("meta")
    return base


def missing_buffers(module: nn.Module) -> list[str]:
    """Buffers that come from no file and are on the meta device, and tensors that are plain attributes; empty ones are marks."""
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
    """Give a module on the meta device the values of these, in fp32, by making it once more without weights.

    Args:
        described: ComfyUI's configuration of the model, as it was made.
        tensors: the file's, as ComfyUI's class is made of them.
        entries: where those of the tensors lie that the class may look into.
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

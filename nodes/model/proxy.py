"""The weightless stand-in for a diffusion model: one forward of it is one request to the workers."""

from __future__ import annotations

from typing import Any

import comfy.patcher_extension
import torch
from torch import Tensor, nn

from ...parallel_backend.errors import Refused
from ...parallel_backend.models.flux import REFERENCE_METHODS, reference_tokens
from .remote import RemoteModel
from .unsupported import refuse_transformer_options

CONDITIONING = ("y", "guidance", "ofs", "attention_mask", "c_size", "c_ar")
"""What the model takes besides the text, by ComfyUI's names."""


class DiffusionProxy(nn.Module):
    """Has the skeleton's parameter names (on the meta device, for LoRA keys) and plain attributes, and no weights."""

    def __init__(self, skeleton: nn.Module, remote: RemoteModel, latent_channels: int) -> None:
        super().__init__()
        self._latent_channels = latent_channels
        self._modules = skeleton._modules
        self._skeleton = (skeleton,)  # in a tuple, so that it does not become a submodule
        self.remote = remote

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_skeleton"][0], name)

    @torch.compiler.disable
    def forward(self, x: Tensor, timestep: Tensor, context: Tensor, **inputs: Any) -> Tensor:
        """The model's output for `x` `[batch, channels, ...]`, in its dtype; runs ComfyUI's DIFFUSION_MODEL wrappers."""
        options = inputs.pop("transformer_options", {})
        wrappers = comfy.patcher_extension.get_all_wrappers(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, options)
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, timestep, context, transformer_options=options, **inputs)

    def _forward(self, x: Tensor, timestep: Tensor, context: Tensor, transformer_options: Any, **inputs: Any) -> Tensor:
        refuse_transformer_options(transformer_options)
        references, method = inputs.pop("ref_latents", None), inputs.pop("ref_latents_method", REFERENCE_METHODS[0])
        given = {name: value for name, value in inputs.items() if value is not None}
        unknown = sorted(set(given) - set(CONDITIONING))
        if unknown:
            raise Refused(f"{', '.join(unknown)} is not supported by this MODEL yet: remove the node that adds it.")
        conditioning = {"context": context, **given}
        if x.shape[1] > self._latent_channels:  # ComfyUI has put c_concat behind the latent's channels
            conditioning["concat"] = x[:, self._latent_channels :]
            x = x[:, : self._latent_channels]
        if references is not None:
            conditioning |= reference_tokens(references, method, x.shape)
        self.remote.check(x, conditioning)
        self.remote.kernel(x.dtype)
        return self.remote.forward({"x": x, "timestep": timestep.float(), **conditioning}, x.dtype).to(x.device)

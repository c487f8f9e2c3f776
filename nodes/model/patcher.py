"""ParallelModelPatcher: ComfyUI's ModelPatcher for a model whose weights the workers hold.

Object patches, wrappers, injections and callbacks work as in ComfyUI. Only the movement of weights does nothing here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ...parallel_backend.weights.adapters.lora import AdapterSet
from ..memory.loaded_models import WorkerPatcher
from .conditioning import STRICT
from .features.adapter_requests import patched_keys
from .refusals import refuse_weights
from .remote_model import RemoteModel
from .run.wrapper import run_in_workers

KEY = "parallel"


class ParallelModelPatcher(WorkerPatcher):
    """A MODEL of a Load Parallel node."""

    _free_memory: dict[torch.device, int] | None = None
    """The first reply of `get_free_memory` for each device, inside `one_free_memory`; None outside."""

    @property
    def remote(self) -> RemoteModel:
        """Return the weights in the workers."""
        return self.model.diffusion_model.remote

    def strict(self) -> ParallelModelPatcher:
        """Return a clone that refuses a run that the workers' own loop does not support, instead of running it step by step."""
        clone: ParallelModelPatcher = self.clone()
        clone.model_options["transformer_options"][STRICT] = True
        return clone

    def add_sampling_wrapper(self) -> None:
        """Add the wrapper that makes samplers run in the workers."""
        self.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, run_in_workers)

    @contextlib.contextmanager
    def one_free_memory(self) -> Iterator[None]:
        """Make `get_free_memory` repeat its first reply for each device inside this context.

        ComfyUI decides by the free memory which prompts share a model call, and must decide the same in a step's second pass.
        """
        self._free_memory = {}
        try:
            yield
        finally:
            self._free_memory = None

    def get_free_memory(self, device: torch.device) -> int:
        """Return the bytes that ComfyUI considers free on a device."""
        if self._free_memory is None:
            return super().get_free_memory(device)  # type: ignore[no-any-return]
        if device not in self._free_memory:
            self._free_memory[device] = super().get_free_memory(device)
        return self._free_memory[device]

    def partially_load(self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        """Apply object patches and injections. The workers load the weights at the first sampling request."""
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            self.unpatch_model()
            self.patch_model(device_to)
        self.model.diffusion_model.shares.enlist()
        return 0

    def load(self, device_to: torch.device | None = None, *_: Any, **__: Any) -> None:
        """Move no weight. Call the callbacks for a load as ComfyUI does."""
        self.model.device = device_to
        self.model.current_weight_patches_uuid = self.patches_uuid
        for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
            callback(self, device_to, 0, False, True)

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        """Undo object patches and injections. No weight moves to `device_to`."""
        super().unpatch_model(None, unpatch_weights)

    def detach(self, unpatch_all: bool = True) -> Any:
        """Undo patches.

        If ComfyUI unloads the model (`unpatch_all`), make workers release their memory; see `Shares.release_main`.
        """
        result = super().detach(unpatch_all)
        if unpatch_all:
            self.model.diffusion_model.shares.release_main()
        return result

    def model_patches_models(self) -> list[Any]:
        """Return no model for this process to load: networks that patches add to the model run in the workers."""
        return []

    def adapters(self) -> AdapterSet:
        """Return the weight patches (LoRA and its kin) in the form that the workers read."""
        return self.remote.reader.read(self.patches, self.patches_uuid, functools.partial(patched_keys, self))

    def add_patches(self, patches: Any, strength_patch: float = 1.0, strength_model: float = 1.0) -> Any:
        """Record LoRA and its kin.

        Raises:
            Refused: the patches merge models, or the workers cannot apply them.
        """
        if any(isinstance(value, list) for value in patches.values()):
            raise refuse_weights("Merging models")
        added = super().add_patches(patches, strength_patch, strength_model)
        self.adapters()
        return added

    def set_injections(self, key: str, injections: Any) -> None:
        """Set injections as ComfyUI does, but refuse LoRA in bypass mode, which hooks into the modules' forward."""
        if key == "bypass_lora":
            raise refuse_weights("Applying a LoRA in bypass mode")
        super().set_injections(key, injections)

    def add_hook_patches(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse LoRA hooks on conditioning."""
        raise refuse_weights("Applying LoRA hooks")

    def get_key_patches(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse nodes that merge models, which read the weights here."""
        raise refuse_weights("Merging models")

    def patch_weight_to_device(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse nodes that extract a LoRA from the difference of two models."""
        raise refuse_weights("Reading the weights")

    def state_dict_for_saving(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse nodes that save a MODEL."""
        raise refuse_weights("Saving the model")

    def deepclone_multigpu(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse MultiGPU CFG Split and Select Model Device."""
        raise refuse_weights("MultiGPU CFG Split")

    def add_weight_wrapper(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse functions that change weights at their use."""
        raise refuse_weights("Wrapping weights")

    def add_object_patch(self, name: str, obj: Any) -> None:
        """Add an object patch as ComfyUI does, but refuse a patch inside the diffusion model."""
        if name.split(".")[0] == "diffusion_model":
            raise refuse_weights(f"Replacing {name}")
        super().add_object_patch(name, obj)

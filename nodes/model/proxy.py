"""The weightless proxy for a diffusion model. Its forward sends one request to the workers."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from torch import Tensor, nn

from ...parallel_backend.conditioning import (
    ALONE,
    ATTENTION_GUIDANCE,
    ATTENTION_OVERRIDE,
    BRANCHES,
    CONCAT,
    NAMES,
    OPTIONS,
    SHAPES,
    TOGETHER,
    Conditioning,
    flatten,
)
from ...parallel_backend.errors import Refused
from ...parallel_backend.models.comfyui.content.model_code import options_read_by
from ...parallel_backend.models.comfyui.rows import CONTROL
from ...parallel_backend.models.comfyui.small.graph_inputs import GraphInputs, graph_inputs_of
from ...parallel_backend.weights.adapters.lora import NONE, AdapterSet
from ...parallel_backend.weights.values import values_of as values_of_entry
from ..memory.loaded_models import Shares
from ..progress import say
from .conditioning import of_call, options_of, sigmas_of
from .features.controlnet import Control, Shapes, refuse_other_control, shapes_in
from .features.feature import FeatureCall, refuse_plan, unhandled, values_of
from .features.feature_list import IN_A_SINGLE_CALL
from .features.networks import networks_of, refuse_stages
from .features.step_cache import runs_wrappers
from .own_writes import is_written
from .proofs import AnotherResult, proofs
from .refusals import WAY_OUT, refuse_transformer_options, refuse_weights
from .remote_model import RemoteModel
from .sampler_run import SamplerRun
from .step_by_step import KEY as STEP_BY_STEP
from .step_by_step import StepByStep
from .unchanged import SkeletonSnapshot
from .undeclared import Parallelise, Undeclared, unsharded_instead


class DiffusionProxy(nn.Module):
    """A module without weights.

    Its parameter names (on the meta device, for LoRA keys) and plain attributes are the skeleton's.
    """

    def __init__(
        self,
        model: Any,
        remote: RemoteModel,
        shares: Shares,
        parallelise: Parallelise,
        undeclared: Undeclared | None = None,
    ) -> None:
        """Replace `model`'s diffusion model, the skeleton. `undeclared` decides how to run a class without a declaration."""
        super().__init__()
        skeleton = model.diffusion_model
        self._latent_channels = model.latent_format.latent_channels
        self._model = weakref.ref(model)  # a weak reference, as the model holds this proxy
        self._modules = skeleton._modules
        self._skeleton = (skeleton,)  # in a tuple, so that the skeleton does not become a submodule
        self.remote = remote
        self.shares = shares
        self._undeclared, self._parallelise = undeclared, parallelise
        self.text_arguments: dict[str, Any] | None = None
        self._control_shapes: dict[object, Shapes] = {}
        self._snapshot = SkeletonSnapshot(skeleton)
        self._own = {*vars(self), "_own"}

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Return the skeleton's class, for nodes that test a model's class."""
        return type(self.__dict__["_skeleton"][0]) if "_skeleton" in self.__dict__ else type(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(self.__dict__["_skeleton"][0], name)
        return self._in_file(name, value) if isinstance(value, Tensor) and value.is_meta else value

    def _in_file(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor's values if the file has the tensor as it is. A node reads SeedVR2's text embeddings so."""
        remote = self.__dict__["remote"]
        entry = remote.config.part.entries.get(name) if remote.shape.unsharded else None
        return tensor if entry is None else values_of_entry(entry).to(tensor.dtype)

    @property
    def skeleton(self) -> Any:
        """Return ComfyUI's diffusion model on the meta device."""
        return self._skeleton[0]

    @property
    def unsharded(self) -> bool:
        """Return True if each worker runs ComfyUI's own forward with all tokens."""
        return self.remote.shape.unsharded

    @torch.compiler.disable
    def forward(self, x: Any, timestep: Any, context: Tensor | None, **inputs: Any) -> Any:
        """Return the model's output for `x` of shape `[batch, channels, ...]`, in the dtype of `x`.

        Run DIFFUSION_MODEL wrappers if ComfyUI's model does. For a model of video and sound, `x` and the output may be lists of
        both latents, and `timestep` a tuple.
        """
        options = inputs.pop("transformer_options", {})
        if STEP_BY_STEP not in options:
            self.prove([graph_inputs_of({"context": context, **inputs})])
        wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, options) if runs_wrappers(self.skeleton) else []
        executor = WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, timestep, context, transformer_options=options, **inputs)

    def _forward(self, x: Any, timestep: Any, context: Tensor | None, transformer_options: Any, **inputs: Any) -> Any:
        if isinstance(x, list):
            x, shapes = comfy.utils.pack_latents(x) if len(x) > 1 else (x[0], [x[0].shape])
            out = self._forward(x, timestep, context, transformer_options, **inputs, **{SHAPES: shapes})
            return comfy.utils.unpack_latents(out, shapes) if len(shapes) > 1 else out
        self.refuse_changes()
        features = FeatureCall(transformer_options, self, x.dtype)
        refuse_transformer_options(unhandled(IN_A_SINGLE_CALL, features), self.skeleton)
        adapters = self.adapters(transformer_options, x.shape)
        control = inputs.pop("control", None)
        conditioning = of_call(context, inputs)
        if control is not None and self.unsharded:
            self._check_control(control, x, {"timestep": timestep, **conditioning.tensors})
            lists = {kind: list(tensors) for kind, tensors in control.items()}
            flatten(CONTROL, lists, conditioning.tensors, conditioning.values)
            control = None
        if self.unsharded and BRANCHES in options_read_by(self.skeleton):
            flatten(f"{OPTIONS}.{BRANCHES}", transformer_options[BRANCHES], {}, conditioning.values)
            conditioning.values.update({TOGETHER: x.shape[0], ALONE: True})
        values = values_of(IN_A_SINGLE_CALL, features)
        compared, overriding = (f"{OPTIONS}.{name}" in values for name in (ATTENTION_GUIDANCE, ATTENTION_OVERRIDE))
        conditioning.values.update(options_of(transformer_options) | values)
        if getattr(self.remote.config, "sigmas", False) or adapters.networks or overriding:
            conditioning.values.update(sigmas_of(transformer_options))
        if x.shape[1] > self._latent_channels:  # ComfyUI has appended c_concat to the latent's channels
            conditioning.tensors[NAMES[CONCAT]] = x[:, self._latent_channels :]
            x = x[:, : self._latent_channels]
        if self._undeclared is not None:
            self._undeclared.check(x, conditioning)
        self.remote.check(x, conditioning)
        self.remote.attention(x.dtype)
        flatten("timestep", timestep, conditioning.tensors, conditioning.values)
        call = Conditioning({"x": x, **conditioning.tensors}, conditioning.values)
        run: StepByStep | None = transformer_options.get(STEP_BY_STEP)
        if run is None:
            job = self.remote.job(call, x.dtype, has_uncond=x.shape[0] > 1 and not compared, steps=1)
            plan = self.remote.plan(job, call, x.dtype, all_tokens=overriding)
            refuse_stages(plan, adapters.networks)
            refuse_plan(IN_A_SINGLE_CALL, features, plan)
            run = StepByStep(plan, self.remote.free_memory(plan, job, adapters))
        else:
            refuse_plan(IN_A_SINGLE_CALL, features, run.plan)
        return run.forward(self.remote, call, x.dtype, adapters, control).to(x.device)

    def _check_control(self, control: Control, x: Tensor, inputs: Mapping[str, Tensor]) -> None:
        """Raise Refused if a ControlNet's output does not fit the model. Of the unsharded models only UNets accept one."""
        if not isinstance(self.skeleton, UNetModel):
            raise Refused(
                f"A ControlNet cannot be used with a parallel {self.remote.shape.name} MODEL yet: remove it, or use Load "
                "Diffusion Model."
            )
        key = tuple((name, tensor.shape) for name, tensor in {"x": x, **inputs}.items())
        if key not in self._control_shapes:
            self._control_shapes[key] = shapes_in(self.remote.config.base_model.diffusion_model, x, inputs)
        refuse_other_control(control, self._control_shapes[key])

    def preprocess_text_embeds(self, text: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the text unchanged.

        The workers run this function, which needs the weights (`text.py`); record its arguments.
        """
        arguments = inspect.signature(self._skeleton[0].preprocess_text_embeds).bind(text, *args, **kwargs).arguments
        self.text_arguments = {name: value for name, value in list(arguments.items())[1:] if value is not None}
        return text

    def prove(self, calls: Sequence[GraphInputs]) -> list[str]:
        """Wait for the proof that the model computes correctly with a graph's inputs. Return notes for the user, only once.

        If the proof has failed, the model runs unsharded from here on, until another declaration is derived.

        Args:
            calls: the inputs that the graph gives the model, for each kind of call.

        Raises:
            Refused: the proof has failed, and workers would share the forward.
        """
        if self._undeclared is not None:
            return []
        try:
            return proofs().check(self.remote.config, self.skeleton, calls, say)
        except AnotherResult as mismatch:
            remote, self._undeclared = unsharded_instead(self.remote, self.skeleton, mismatch, self._parallelise)
            self._exchange(remote)
            return []

    @property
    def may_be_parallelised(self) -> bool:
        """Return True if a run may be parallelised by a declaration that is still to be derived."""
        return self._undeclared is not None

    def choose(self, run: SamplerRun) -> list[str]:
        """Choose the division of a run of an undeclared class over the workers, and return notes for the user.

        Raises as `Undeclared.choose` does.
        """
        if self._undeclared is None:
            return []
        remote, notes = self._undeclared.choose(run)
        if remote is not self.remote:
            self._exchange(remote)
        return notes

    def _exchange(self, remote: RemoteModel) -> None:
        """Replace the model in the workers by another form of it (unsharded or parallelised)."""
        self.remote.backend.release(self.remote.spec)
        self.remote = remote
        self.shares = self.shares.of(remote)
        self.shares.enlist()
        remote.backend.retain(self._model(), remote.spec)

    def __deepcopy__(self, _: dict[int, Any]) -> DiffusionProxy:
        """Refuse a copy, which would keep the patches of the original MODEL."""
        raise refuse_weights("Copying the diffusion model (copy.deepcopy)")

    def run_by(self, model: Any) -> None:
        """Use the patches of the sampled model, which may be a copy (copy.copy) of the model that this proxy was built in."""
        if self._model() is not model:
            self._model = weakref.ref(model)
            self.remote.backend.retain(model, self.remote.spec)

    def refuse_changes(self) -> None:
        """Raise Refused if another pack has changed the diffusion model or the code that its classes reach."""
        written, skeleton = self._snapshot.own_writes.of(self._model()), self._skeleton[0]
        added = {name: value for name, value in vars(self).items() if name not in self._own}
        root = written.get("", {})
        # Code outside the model writes attributes of the proxy; methods of the model write attributes of the skeleton.
        on_skeleton = {name: value for name, value in root.items() if name not in added}
        self._snapshot.refuse_changes({**written, "": on_skeleton})
        for name, value in added.items():
            if name in root:
                same = is_written(value, root[name])
            else:
                same = not hasattr(skeleton, name) or hasattr(type(self), name) or value is getattr(skeleton, name)
            if not same:
                raise refuse_weights(f"Changing diffusion_model.{name}")

    def adapters(self, options: Mapping[str, Any], shape: Sequence[int]) -> AdapterSet:
        """Return the adapters of the sampled MODEL, with the networks in its transformer_options.

        Args:
            options: the transformer_options.
            shape: the latent's shape.

        Raises:
            Refused: there are patches that the workers cannot apply.
        """
        model = self._model()
        assert model is not None
        changes = model.current_patcher.adapters() if model.current_patcher is not None else NONE
        tensors = dict(changes.tensors)
        name = functools.partial(self.remote.reader.add, tensors=tensors)
        networks = networks_of(options, self.skeleton, shape, name)
        if networks and self.unsharded:
            raise Refused(f"A model patch cannot be used with this model ({self.remote.unsharded_reason}): {WAY_OUT}.")
        return replace(changes, tensors=tensors, networks=networks) if networks else changes

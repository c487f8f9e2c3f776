"""A model of a class without a written declaration: it runs unsharded until one is derived for the graph's kind of call.

A process of its own derives and proves the declaration with the run's own prompts, and a file caches it. A declaration that was
proved for other kinds of calls is never used.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import comfy.clip_vision
import comfy.model_management
import msgspec
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import Tensor, nn

from ...parallel_backend.conditioning import BRANCHES, CROSS_ATTENTION, Conditioning
from ...parallel_backend.declaration import Declaration
from ...parallel_backend.derive.call_kind import CallKind, kind_of
from ...parallel_backend.derive.declaration_cache import difference, key_of
from ...parallel_backend.derive.prompt import PromptExample, as_dicts
from ...parallel_backend.derive.request import DeriveReply
from ...parallel_backend.errors import PlanRefused, Refused
from ...parallel_backend.host import Deadlines
from ...parallel_backend.host.deriving import Derivation
from ...parallel_backend.host.workers.versions import own_comfyui_version
from ...parallel_backend.models.comfyui.config import SEQUENCES, ComfyConfig
from ...parallel_backend.models.comfyui.content.model_code import options_read_by, sources_of
from ...parallel_backend.models.comfyui.features.node_functions import REPLACED
from ...parallel_backend.models.comfyui.own_call import MASK
from ...parallel_backend.models.families import FAMILIES, UNSHARDED
from ...parallel_backend.plan import ModelLimits, Workload
from ...parallel_backend.plan.resolve import feasible, planned_devices
from ...parallel_backend.weights.files.checkpoint import read_header
from ..progress import say
from .conditioning import SAMPLING_KEYS, is_constant_tensor, of_prompt, options_of
from .features.attention_override import OPTION as OVERRIDE
from .features.compile import compiler_of
from .features.networks import PATCHES
from .proofs import ONE_GPU, AnotherResult
from .remote_model import RemoteModel
from .sampler_run import SamplerRun
from .trials import FOLDER

ANY = ModelLimits(heads=1 << 10, head_dim=64, blocks=1 << 10)
"""Limits of a model that a derived declaration may split in any way."""

OF_THE_SAMPLER = frozenset({*SAMPLING_KEYS, "model_conds", "uuid", "strength", "timestep_start", "timestep_end"})
"""Entries of a prompt that its model's class does not read."""

PREPARES_TEXT = "preprocess_text_embeds"

MEANWHILE = (
    "New model: this picture runs unsharded while the pack works out how to split the model; queue again in a minute."
)

WAY_OUT = "use a plan without ulysses, ring, pipefusion and sharded or streamed weights, or Load Diffusion Model"


def may_be_derived(config: Any) -> bool:
    """Return True if a declaration may be derived: for a transformer over pictures that does not prepare text by its weights."""
    if not isinstance(config, ComfyConfig) or config.declaration is not None:
        return False
    if config.latent_dims not in (2, 3) or config.kind in SEQUENCES:
        return False
    model = config.base_model.diffusion_model
    lists = any(isinstance(module, nn.ModuleList) for module in model.modules())
    return (
        lists
        and not isinstance(model, UNetModel)
        and not hasattr(model, PREPARES_TEXT)
        and BRANCHES not in options_read_by(model)
    )


Parallelise: TypeAlias = Callable[[RemoteModel, Declaration, bool], RemoteModel]
"""The function that makes a parallelised model from an unsharded model, a declaration and a flag that allows compiled blocks.

It raises Refused if the requested plan cannot work.
"""


class Undeclared:
    """A MODEL of a class without a written declaration, or with a wrong one.

    Args:
        unsharded: the model that runs until a declaration is derived.
        parallelise: see Parallelise.
        mismatch: the fault of the existing declaration; empty if there is none.
    """

    def __init__(self, unsharded: RemoteModel, parallelise: Parallelise, mismatch: str = "") -> None:
        self.unsharded = unsharded
        self._mismatch = mismatch
        self._parallelise = functools.lru_cache(maxsize=1)(functools.partial(parallelise, unsharded))
        model, described = unsharded.config.base_model.diffusion_model, unsharded.config.described
        key = key_of(unsharded.config.kind, described.unet_config, sources_of(model, FOLDER))
        self._derivation = derivation(key, unsharded.config.kind, unsharded.spec.path)
        self._kinds: tuple[CallKind, ...] = ()

    def choose(self, run: SamplerRun) -> tuple[RemoteModel, list[str]]:
        """Return the model for a run, and notes for the user.

        Raises:
            Refused: no declaration is proved for the run, and the plan does not allow an unsharded model.
            InterruptProcessingException: the user pressed ComfyUI's Cancel while this method waited for a declaration.
        """
        requested_plan = self.unsharded.backend.placed_on_devices(self.unsharded.requested_plan)
        if len(planned_devices(requested_plan, torch.cuda.device_count())) < 2:
            self._kinds = ()
            return self.unsharded, []
        name, needed = self.unsharded.config.kind, self._refuses_unsharded(run)
        answer, reason, note = None, _unproved_feature(run, self.unsharded.config), ""
        if not reason:
            answer, reason, note = self._derived(_prompts(run), wait=bool(needed))
        if answer is not None and not answer.compiled and compiler_of(run.model_options):
            answer, reason = None, "its compiled blocks were not proved to give the same result"
        if answer is not None and answer.declaration is not None:
            remote, self._kinds = self._parallelise(answer.declaration, answer.compiled), answer.kinds
            took = [
                f"New model: worked out how to split the model ({derived.seconds:.0f} s, once)."
                for derived in self._derivation.new_answers()
            ]
            if self.unsharded.requested_plan.compiler and not answer.compiled:
                took.append(f"The blocks are not compiled: compiled, {name} was not proved to give the same result.")
            return remote, took
        if needed:
            reason = f"{self._mismatch}, and {reason}" if self._mismatch else reason
            raise Refused(f"{name} cannot be run under this plan, because {reason}: {WAY_OUT}.")
        self._kinds = ()
        return self.unsharded, [note or f"New model: this picture runs unsharded, because {reason}."]

    def check(self, latent: Tensor, conditioning: Conditioning) -> None:
        """Raise Refused for a call whose kind is not covered by the chosen declaration's proof."""
        if self._kinds and (strange := difference(self._kinds, [kind_of(latent, conditioning)])):
            raise Refused(
                f"{self.unsharded.config.kind} was not proved to give the same result on several workers with {strange}: remove "
                "the node that adds it, or use Load Diffusion Model."
            )

    def _derived(self, prompts: list[PromptExample], wait: bool) -> tuple[DeriveReply | None, str, str]:
        """Return the reply that covers all prompts, or else a reason against one, or a note about the work in progress."""
        kinds = [prompt.kind for prompt in prompts]
        answer, reason = self._derivation.found(kinds), self._derivation.failed(kinds)
        if answer is None and not reason and not wait:
            self._derivation.begin(prompts)
            return None, "", MEANWHILE
        if answer is None and not reason:
            say("New model: working out how to split the model, once")
            self._derivation.wait(prompts, comfy.model_management.processing_interrupted)
            comfy.model_management.throw_exception_if_processing_interrupted()
            answer, reason = self._derivation.found(kinds), self._derivation.failed(kinds)
        return answer, reason, ""

    def _refuses_unsharded(self, run: SamplerRun) -> str:
        """Return the reason why the plan refuses an unsharded run; empty if it does not."""
        two = sum(bool(entries) for entries in run.guider.conds.values()) > 1
        workload = Workload(run.noise.shape[0], two, 1)
        try:
            feasible(
                self.unsharded.backend.placed_on_devices(self.unsharded.requested_plan),
                torch.cuda.device_count(),
                self.unsharded.shape.limits,
                workload,
            )
        except PlanRefused as refusal:
            return str(refusal)
        return ""


def _unproved_feature(run: SamplerRun, config: ComfyConfig) -> str:
    """Return the feature of a run that no derived class is proved for, as a reason; empty if there is none."""
    options = run.transformer_options
    entries = [entry for entries in run.guider.conds.values() for entry in entries or ()]
    if run.noise.ndim != config.latent_dims + 2:
        return "its latent packs several latents together"
    if any(CROSS_ATTENTION not in entry["model_conds"] for entry in entries):
        return "its prompts have no text"
    if any(map(is_constant_tensor, (value for entry in entries for value in entry["model_conds"].values()))):
        return "its prompts have one tensor for the entire batch"
    if any(entry.get("control") is not None for entry in entries):
        return "a ControlNet needs a model class that this pack declares"
    if strange := [name for name in (PATCHES, REPLACED, OVERRIDE) if options.get(name)]:
        return f"the option {strange[0]} of a node needs a model class that this pack declares"
    if strange := [*options_of(options)]:
        return f"the option {strange[0].partition('.')[2]} of a node needs a model class that this pack declares"
    return ""


def _prompts(run: SamplerRun) -> list[PromptExample]:
    """Return one example prompt for each kind of call in a run."""
    dtype = run.guider.inner_model.get_dtype_inference()
    examples: dict[CallKind, PromptExample] = {}
    for entries in run.guider.conds.values():
        for entry in entries or ():
            kind = kind_of(run.noise, of_prompt(entry["model_conds"], dtype, run.noise.shape[0]))
            examples.setdefault(kind, PromptExample(_entries(entry, run.mask), tuple(run.noise.shape), kind))
    return [*examples.values()]


def _entries(entry: Mapping[str, Any], mask: Tensor | None) -> dict[str, Any]:
    """Return the entries of a prompt that the model's class reads."""
    named = {**entry, MASK: mask}
    return {
        name: as_dicts(value, comfy.clip_vision.Output)
        for name, value in named.items()
        if name not in OF_THE_SAMPLER and value is not None
    }


@functools.lru_cache(maxsize=64)
def derivation(key: str, kind: str, path: str) -> Derivation:
    """Return the derivation that all MODELs of a class share."""
    seconds = Deadlines.read(os.environ).derive
    return Derivation(key, kind, path, str(FOLDER), own_comfyui_version(), seconds)


def unsharded_instead(
    remote: RemoteModel, skeleton: Any, mismatch: AnotherResult, parallelise: Parallelise
) -> tuple[RemoteModel, Undeclared | None]:
    """Return the same file's model, unsharded. For several workers, also return the object that may parallelise it later.

    Args:
        skeleton: the diffusion model, on the meta device.
        mismatch: the verdict of the proof.

    Raises:
        Refused: the model cannot run unsharded. Either the class prepares its text by its weights, or the plan has
            several workers and the class cannot be derived.
    """
    if hasattr(skeleton, PREPARES_TEXT):
        raise Refused(str(mismatch).replace(ONE_GPU, ""))
    family = FAMILIES[UNSHARDED]
    _, config = family.inspect(read_header(remote.spec.path))
    spec = msgspec.structs.replace(remote.spec, family=UNSHARDED)
    unsharded = replace(remote, family=family, config=config, spec=spec, unsharded_reason=mismatch.unsharded_reason)
    if len(remote.devices) < 2:
        return unsharded, None
    if not may_be_derived(config):
        raise mismatch
    unsharded = replace(unsharded, unsharded_reason=f"{config.kind} runs unsharded for now: {mismatch.split}.")
    return unsharded, Undeclared(unsharded, parallelise, mismatch.split)

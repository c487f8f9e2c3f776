"""The trial of ComfyUI's sampling: its own loop and the workers' loop run in this process, on a network without weights."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.conds
import comfy.model_base
import comfy.model_patcher
import comfy.samplers
import comfy.supported_models_base
import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from torch import Tensor, nn

from ....parallel_backend.comm.communicator import Communicator
from ....parallel_backend.comm.meter import Meter
from ....parallel_backend.denoise.guidance import Guidance
from ....parallel_backend.denoise.model_calls import ModelCalls
from ....parallel_backend.denoise.noise import LatentNoise, SharedNoise
from ....parallel_backend.denoise.patch_sampler import Inpaint, PatchSampler
from ....parallel_backend.denoise.pipeline import Callbacks, CancelSignal, Patch, Pipeline
from ....parallel_backend.denoise.process import process_of
from ....parallel_backend.denoise.prompts import Prompts
from ....parallel_backend.denoise.replay import DeviceProgram
from ....parallel_backend.denoise.step_cache import step_cache
from ....parallel_backend.mesh import Mesh
from ....parallel_backend.mesh_axes import MeshAxis
from ....parallel_backend.models.comfyui.content.replaced_functions import Kind
from ....parallel_backend.models.inputs import Inputs, Region
from ....parallel_backend.weights.stores.store import BlockAccess
from ..recording.record import recorded
from ..sampler_run import SamplerRun
from ..trials import random
from .message import fields_of

SHAPE = 2, 4, 8, 6
"""The shape of the latents: batch, channels, height, width."""

STEPS = 6
SEED = 11


@dataclass(frozen=True)
class TrialCase:
    """The settings of a trial's run.

    Attributes:
        type: ComfyUI's name of the noise process.
        sampler: ComfyUI's name of the sampler.
        cfg: the guidance scale.
        texts: the numbers of tokens of the positive prompts; the negative prompt has 3.
        denoise: the part of the steps that runs; below 1 the run starts from a latent that is not empty.
        masked: True if the run has a mask.
        patches: the number of patches of the latent.
        cache: the class of a step cache's state.
    """

    type: str = "FLOW"
    sampler: str = "euler"
    cfg: float = 3.0
    texts: tuple[int, ...] = (3,)
    denoise: float = 1.0
    masked: bool = False
    patches: int = 1
    cache: str = ""


CASES: Mapping[Kind, tuple[TrialCase, ...]] = {
    "sampler driver": (TrialCase(), TrialCase("EPS", denoise=0.5), TrialCase("FLUX", cfg=1.0, denoise=0.5, patches=2)),
    "guidance": (
        TrialCase(),
        TrialCase("FLUX", cfg=1.0),
        TrialCase("EPS", texts=(3, 3)),
        TrialCase("V_PREDICTION", texts=(3, 5), denoise=0.5),
        TrialCase("FLOW", "euler_cfg_pp", cfg=1.0),
    ),
    "mask": (
        TrialCase(masked=True),
        TrialCase("EPS", "ddim", masked=True, patches=2),
        TrialCase("FLUX", cfg=1.0, masked=True),
    ),
    "noise sampler": (
        TrialCase(sampler="euler_ancestral"),
        TrialCase("EPS", "euler_ancestral", patches=2),
        TrialCase(sampler="dpmpp_2m_sde", patches=2),
        TrialCase("EPS", "dpmpp_sde"),
    ),
    "step cache": (
        TrialCase(cache="EasyCacheHolder"),
        TrialCase("EPS", cache="EasyCacheHolder", texts=(3, 5)),
        TrialCase(cache="LazyCacheHolder"),
        TrialCase("EPS", cache="LazyCacheHolder", cfg=1.0),
    ),
}
"""Runs that test each kind of replaced function: whole and in patches, with one prompt and two, with and without guidance."""

CACHES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "EasyCacheHolder": {
        WrappersMP.OUTER_SAMPLE: ("easycache", "easycache_sample_wrapper"),
        WrappersMP.CALC_COND_BATCH: ("easycache", "easycache_calc_cond_batch_wrapper"),
        WrappersMP.DIFFUSION_MODEL: ("easycache", "easycache_forward_wrapper"),
    },
    "LazyCacheHolder": {
        WrappersMP.OUTER_SAMPLE: ("lazycache", "easycache_sample_wrapper"),
        WrappersMP.PREDICT_NOISE: ("lazycache", "lazycache_predict_noise_wrapper"),
    },
}
"""The wrappers that the nodes of step caches add to a run: by type, the wrapper's key and the function's name."""


def sampling_results(kind: Kind, caches: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the results of the workers' loop and of ComfyUI's loop for each case of a kind of replaced function.

    Args:
        kind: the kind of replaced function.
        caches: ComfyUI's module of step caches; needed for step caches only.
    """
    for case in CASES[kind]:
        yield SamplingTrial(case, caches).results()


class TrialNetwork(nn.Module):
    """A network without weights that computes each element of a latent from the element, the timestep and the text."""

    def __init__(self, device: Any = None, operations: Any = None, **_: Any) -> None:
        super().__init__()
        self.dtype = torch.float32

    @property
    def skeleton(self) -> TrialNetwork:
        """Return the network itself: it has no weights."""
        return self

    @property
    def unsharded(self) -> bool:
        """Return False, as the proxy of a parallelised model does."""
        return False

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        control: Any = None,
        transformer_options: Any = None,
        **_: Any,
    ) -> Tensor:
        """Run the network inside the DIFFUSION_MODEL wrappers, as ComfyUI's models do."""
        options = transformer_options or {}
        wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, options)
        executor = WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        out: Tensor = executor.execute(x, timestep, context, transformer_options=options)
        return out

    def _forward(self, x: Tensor, timestep: Tensor, context: Tensor, transformer_options: Any) -> Tensor:
        return computed(x, timestep, context)


def computed(x: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
    """Return the output of the trial's network.

    Args:
        x: the latent `[batch, channels, height, width]`.
        timestep: `[batch]`.
        context: the text `[batch, tokens, features]`.
    """
    time, text = (tensor.view(-1, 1, 1, 1) for tensor in (timestep / (1 + timestep), context.mean(dim=(1, 2))))
    return x * (1.1 - time) / (1 + x * x) + 0.3 * text * (1 - time)


class TrialModel(comfy.model_base.BaseModel):
    """ComfyUI's model around a TrialNetwork."""

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Return the text in the form that models with parallelised blocks take."""
        return {"c_crossattn": comfy.conds.CONDRegular(kwargs["cross_attn"])}


class TrialConfig(comfy.supported_models_base.BASE):
    """The configuration from which ComfyUI builds a TrialModel."""

    sampling_settings = {"shift": 2.0}  # noqa: RUF012 (ComfyUI's class has it so)


class SamplingTrial:
    """One run, by the workers' loop and by ComfyUI's loop."""

    def __init__(self, case: TrialCase, caches: Any) -> None:
        self._case = case
        self._caches = caches
        with _quiet():
            self._model = TrialModel(TrialConfig({}), comfy.model_base.ModelType[case.type], unet_model=TrialNetwork)
        self._patcher = comfy.model_patcher.ModelPatcher(self._model, torch.device("cpu"), torch.device("cpu"))
        self._model.current_patcher = self._patcher
        self._noise, self._latent, self._drawn = (random(seed, SHAPE) for seed in range(3))
        self._mask = (self._drawn > 0).float() if case.masked else None
        sigmas = comfy.samplers.calculate_sigmas(self._model.model_sampling, "simple", STEPS)
        self._sigmas = sigmas[round(STEPS * (1 - case.denoise)) :]
        self._reached = False

    def results(self) -> tuple[Tensor, Tensor]:
        """Return the result of the workers' loop and that of ComfyUI's loop.

        Raises:
            RuntimeError: ComfyUI ignores the wrappers, so that both results would be its own.
        """
        expected = self._run({})
        ours = self._run({WrappersMP.SAMPLER_SAMPLE: {"parallel": [self._in_workers]}})
        if not self._reached:
            raise RuntimeError("this ComfyUI does not run the wrappers around a sampler")
        return ours, expected

    def _run(self, wrappers: Mapping[str, Any]) -> Tensor:
        case, patcher = self._case, self._patcher.clone()
        around = patcher.model_options["transformer_options"].setdefault("wrappers", {})
        around.update({kind: dict(named) for kind, named in wrappers.items()})
        if case.cache:
            kind = getattr(self._caches, case.cache)
            patcher.model_options["transformer_options"]["easycache"] = kind(
                0.3, 0.1, 0.95, 2, False, False, output_channels=SHAPE[1]
            )
            for point, (key, name) in CACHES[case.cache].items():
                around.setdefault(point, {})[key] = [getattr(self._caches, name)]
        guider = comfy.samplers.CFGGuider(patcher)
        positive: list[list[Any]] = [
            [random(20 + number, (1, tokens, 4)), {}] for number, tokens in enumerate(case.texts)
        ]
        if len(positive) > 1:
            positive[0][1].update(strength=0.6)
            positive[1][1].update(strength=1.3, start_percent=0.0, end_percent=0.6)
        guider.set_conds(positive, [[random(30, (1, 3, 4)), {}]])
        guider.set_cfg(case.cfg)
        guider.inner_model = self._model
        guider.conds = {
            branch: [entry.copy() for entry in entries] for branch, entries in guider.original_conds.items()
        }
        sampler = comfy.samplers.sampler_object(case.sampler)
        latent = torch.zeros(SHAPE) if case.denoise == 1.0 and not case.masked else self._latent

        def sample(noise: Tensor, latent: Tensor, sampler: Any, sigmas: Tensor) -> Any:
            return guider.inner_sample(
                noise, latent, torch.device("cpu"), sampler, sigmas, self._mask, None, True, SEED, latent_shapes=[SHAPE]
            )

        outer = get_all_wrappers(WrappersMP.OUTER_SAMPLE, patcher.model_options, is_model_options=True)
        with _quiet():
            executor = WrapperExecutor.new_class_executor(sample, guider, outer)
            result: Tensor = executor.execute(self._noise, latent, sampler, self._sigmas.clone())
        return result

    def _in_workers(
        self,
        executor: Any,
        guider: Any,
        sigmas: Tensor,
        extra_args: dict[str, Any],
        callback: Any,
        noise: Tensor,
        latent: Tensor,
        mask: Tensor | None = None,
        disable_pbar: bool = False,
    ) -> Tensor:
        """Run the workers' loop instead of the sampler, as `wrapper.run_in_workers` does."""
        self._reached = True
        run = SamplerRun(executor.class_obj, guider, sigmas, extra_args, noise, latent, mask)
        recording = recorded(run)
        fields, tensors = fields_of(run, recording)
        result = _denoised(fields, tensors, recording.needed(), self._case.patches)
        sampled: Tensor = guider.inner_model.model_sampling.inverse_noise_scaling(sigmas[-1], result)
        return sampled


def _denoised(fields: Mapping[str, Any], tensors: Mapping[str, Tensor], program: Any, patches: int) -> Tensor:
    """Return the result of a SampleRequest on one worker, with the trial's network as the model."""
    x, here = tensors["x"], torch.device("cpu")
    mesh = Mesh(groups=(), **{axis.value: Communicator(axis.traffic, None, here, False, Meter()) for axis in MeshAxis})
    branches = {0: fields["positive"]} if fields["negative"] is None else {0: fields["positive"], 1: fields["negative"]}
    rows = slice(0, x.shape[0])
    prompts = Prompts(branches, [*branches], tensors, torch.float32, x.shape[0], rows)
    process = process_of(fields["sampling"], tensors)
    cache = step_cache(fields["cache"], prompts, mesh, bool)
    script = DeviceProgram(program, x.ndim, here)
    height = x.shape[2] // patches
    regions = [Region(2, slice(height * number, height * (number + 1))) for number in range(patches)]

    def forward(inputs: Inputs, latent: Tensor | None, patch: int | None) -> Tensor:
        assert latent is not None and patch is None and inputs.timestep is not None
        return computed(latent, inputs.timestep, inputs.conditioning["context"])

    def sampler(region: Region) -> PatchSampler:
        noise = LatentNoise(tuple(x.shape), here, SharedNoise(mesh, x.shape, [rows], region))
        inpaint = Inpaint.of(tensors, process, region.of, fields.get("clean_inpaint", False))
        return PatchSampler(script, region.of(x), noise, inpaint)

    model = ModelCalls(
        forward=forward,
        access=BlockAccess(),
        prompts=prompts,
        guidance=Guidance(process, fields["cfg"], prompts.mine, mesh.cfg),
        process=process,
        sigmas=tensors["sigmas"],
        cache=cache,
        dtype=torch.float32,
        meter=Meter(),
    )
    pipeline = Pipeline(
        mesh=mesh,
        model=model,
        calls=script.calls(),
        patches=[Patch(region, sampler(region)) for region in regions],
        latent=x,
        warmup_steps=STEPS + 1,
        callbacks=Callbacks(
            cancelled=CancelSignal(is_requested=lambda: False, broadcast_flag=bool),
            step_begins=lambda step: None,
            step_done=lambda *step: None,
        ),
    )
    result = pipeline.run()
    assert result is not None
    return result


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence ComfyUI's logs: this trial run is ours, not the user's."""
    logger = logging.getLogger()
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)

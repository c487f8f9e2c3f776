"""Fixtures for real workers without ComfyUI: one Backend for all tests of this folder, and jobs for it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from parallel_backend.comfyui_folder import FOLDER
from parallel_backend.conditioning import Conditioning, flatten
from parallel_backend.diffusion import FlowSettings, ModelSpec, PromptSpec, Value
from parallel_backend.host import Backend
from parallel_backend.host.backend import OnPixels, OnProgress
from parallel_backend.host.workers.pending_request import RequestContext, RequestReply
from parallel_backend.plan import ParallelPlan, ResolvedPlan
from parallel_backend.weights.adapters.lora import NONE, AdapterSet
from parallel_backend.weights.files.digest import file_digest
from tests.support.pipefusion_simulation import load_model, simulate
from tests.support.programs import encoded_program
from tests.support.tiny.flux import POOLED_WIDTH, TEXT_WIDTH, save_flux
from tests.support.tiny.models import draw

TOLERANCE = 1e-5
SCHNELL = FlowSettings(timestep_scale=1.0, noise_scale=1.0)
ANYONE = RequestContext()


@dataclass(frozen=True)
class Job:
    """A denoise of the schnell type on a tiny model, from pure noise; of the dev type if `guidance` is set.

    `references` are the heights and widths of latents of reference pictures after both prompts, each in a plane of its own.
    """

    path: Path
    sigmas: Tensor
    sampler: str = "euler"
    cfg: float = 2.0
    height: int = 16
    width: int = 16
    batch: int = 1
    text: tuple[int, int] = (21, 21)
    seed: int = 3
    positive_ends: float | None = None
    guidance: float | None = None
    references: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def noise(self) -> Tensor:
        return draw(self.batch, 16, self.height, self.width, seed=self.seed)

    @functools.cached_property
    def prompts(self) -> list[tuple[Tensor, Tensor]]:
        """Return the text and the pooled text of the positive and of the negative prompt."""
        places = enumerate(self.text, self.seed + 1)
        return [
            (draw(1, tokens, TEXT_WIDTH, seed=place), draw(1, POOLED_WIDTH, seed=place + 100))
            for place, tokens in places
        ]

    @functools.cached_property
    def reference_latents(self) -> list[Tensor]:
        return [draw(1, 16, *size, seed=place) for place, size in enumerate(self.references, self.seed + 10)]


def prompt_specs(
    side: str, prompts: Iterable[Mapping[str, Tensor]], tensors: dict[str, Tensor], **fields: Any
) -> list[PromptSpec]:
    """Add the tensors of a branch's prompts to a request's, and return the prompts as the request names them.

    Args:
        fields: further fields of each PromptSpec.
    """
    specs = []
    for number, prompt in enumerate(prompts):
        names = {name: f"prompt.{side}.{number}.{name}" for name in prompt}
        tensors |= {names[name]: tensor for name, tensor in prompt.items()}
        specs.append(PromptSpec(names, **fields))
    return specs


def spec_of(family: str, path: Path) -> ModelSpec:
    """Return the ModelSpec of a model file as it is now."""
    status = os.stat(path)
    return ModelSpec(family, str(path), status.st_mtime_ns, status.st_size, "float32", file_digest(path))


class Runner:
    """A client that runs jobs on workers and keeps the last run's reports. The workers find ComfyUI where COMFYUI_PATH says."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._environment = pytest.MonkeyPatch()
        self._environment.setenv(FOLDER, os.environ["COMFYUI_PATH"])
        self.answer: RequestReply | None = None

    def sample(
        self,
        family: str,
        path: Path,
        tensors: dict[str, Tensor],
        plan: ResolvedPlan,
        caller: RequestContext = ANYONE,
        on_step: OnProgress = lambda *_: None,
        adapters: AdapterSet = NONE,
        **fields: Any,
    ) -> Tensor:
        """Return the final latent of any model; `fields` are further fields of the SampleRequest."""
        settings: dict[str, Any] = {"compute_dtype": "float32"} | fields
        model = spec_of(family, path)
        self.answer = self.backend.sample(tensors, on_step, caller, adapters, model=model, plan=plan, **settings)
        return self.answer.frame.tensors["result"]

    def forward(
        self, family: str, path: Path, calls: Sequence[dict[str, Tensor]], plan: ResolvedPlan, **fields: Any
    ) -> Tensor:
        """Return the outputs of one forward of any model for each call, in fp32, joined along the batch."""
        spec = spec_of(family, path)
        self.answer = self.backend.forward(
            [*map(Conditioning, calls)], ANYONE, model=spec, plan=plan, compute_dtype="float32", **fields
        )
        return self.answer.frame.tensors["result"]

    def decode(
        self,
        path: Path,
        latent: Tensor,
        requested_plan: ParallelPlan,
        working: int = 0,
        on_pixels: OnPixels = lambda *_: None,
    ) -> None:
        """Decode videos with one of ComfyUI's VAEs."""
        spec = spec_of("comfyui vae", path)
        self.answer = self.backend.decode(spec, requested_plan, "", latent, on_pixels, ANYONE, working)

    def __call__(
        self,
        job: Job,
        plan: ResolvedPlan,
        cancel_at: int | None = None,
        on_loading: Callable[[int, int], None] = lambda done, total: None,
        is_cancelled: Callable[[], bool] = lambda: False,
        on_step: Callable[[], object] = lambda: None,
        compiler: str = "",
        adapters: AdapterSet = NONE,
        replaced: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """Return the final latent, with blocks compiled if a compiler is named, and with adapters in the weights.

        Tensors in `replaced` travel in place of the job's own, by their names in the message.

        The run is cancelled once the step `cancel_at` is reported or `is_cancelled` is True.
        """
        seen: list[int] = []

        def step_done(step: int, *_: Tensor) -> None:
            seen.append(step)
            on_step()

        program = encoded_program(job.sampler, job.sigmas, job.noise, seed=job.seed)
        tensors = {"x": job.sigmas[0] * job.noise, "sigmas": job.sigmas, "program": program}
        beside: dict[str, Tensor] = {} if job.guidance is None else {"guidance": torch.tensor([job.guidance])}
        values: dict[str, Value] = {}
        if job.references:
            flatten("ref_latents", job.reference_latents, beside, values)
            values["ref_latents_method"] = "index"
        sides: dict[str, Any] = {}
        for side, (context, pooled) in zip(("positive", "negative"), job.prompts, strict=True):
            sides[side] = prompt_specs(side, [{"context": context, "y": pooled, **beside}], tensors, values=values)
        if job.positive_ends is not None:
            (whole,) = sides["positive"]
            changed = msgspec.structs.replace
            sides["positive"] = [changed(whole, end=job.positive_ends), changed(whole, strength=0.5)]
        if job.cfg == 1.0:
            sides["negative"] = None
        return self.sample(
            "comfyui",
            job.path,
            {**tensors, **replaced},
            plan,
            RequestContext(lambda: cancel_at in seen or is_cancelled(), on_loading),
            step_done,
            adapters,
            sampling=SCHNELL,
            cfg=job.cfg,
            compiler=compiler,
            **sides,
        )

    def diffusers(self) -> set[str]:
        """Return the versions of diffusers in the running workers."""
        (group,) = self.backend._groups.values()
        return {member.diffusers for member in group._members.values()}

    def workers(self) -> list[int]:
        """Return the running workers' process ids, by rank."""
        (group,) = self.backend._groups.values()
        return [process.pid for process in group._launched.processes if process.pid is not None]

    def end_workers(self) -> None:
        """Stop the workers. The next run starts new ones."""
        for group in self.backend._groups.values():
            group.stop()
        self.backend._groups.clear()

    def close(self) -> None:
        """Stop the workers and the processes that start them."""
        self.backend.close()
        self._environment.undo()


@pytest.fixture(scope="session")
def run() -> Iterator[Runner]:
    """Provide a Runner on real workers, which import diffusers from the folder WORKERS_DIFFUSERS if it is set."""
    runner = Runner(Backend())
    with pytest.MonkeyPatch.context() as patch:
        if folder := os.environ.get("WORKERS_DIFFUSERS"):
            patch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        yield runner
    runner.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return tiny models of 3 blocks by their number of heads."""
    folder = tmp_path_factory.mktemp("models")
    return {heads: save_flux(folder / f"{heads}.safetensors", heads=heads, seed=heads) for heads in (2, 3, 4)}


Simulated = Callable[..., Tensor]


@pytest.fixture(scope="session")
def simulated() -> Simulated:
    """Return a function that runs a job with ComfyUI's own model and sampler in one process, under PipeFusion's rule.

    One patch gives the exact result.
    """
    done: dict[object, Tensor] = {}
    loaded = functools.cache(lambda path: load_model(load_file(path)))

    def simulation(job: Job, patches: int = 1, warmup_steps: int = 1) -> Tensor:
        shape = (job.height, job.width, job.batch, job.text, job.references)
        key = (job.path, len(job.sigmas), job.sampler, job.cfg, shape, patches, warmup_steps)
        if key not in done:
            done[key] = simulate(
                {},
                noise=job.noise,
                sigmas=job.sigmas.clone(),
                positive=job.prompts[0],
                negative=job.prompts[1] if job.cfg != 1.0 else None,
                cfg=job.cfg,
                sampler=job.sampler,
                seed=job.seed,
                references=job.reference_latents,
                patches=patches,
                warmup_steps=warmup_steps,
                model=loaded(job.path),
            )
        return done[key]

    return simulation


def sigmas(steps: int) -> Tensor:
    """Return ComfyUI's `simple` schedule of the schnell type."""
    return torch.linspace(1, 0, steps + 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests by their number of workers, so that workers seldom start anew."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    places = [index for index, item in enumerate(items) if item in here]
    for index, item in zip(places, sorted(here, key=_workers), strict=True):
        items[index] = item


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the workers after this folder's last test, so that they do not disturb tests of other folders."""
    last = nextitem is None or Path(__file__).parent not in nextitem.path.parents
    run = item.funcargs.get("run") if isinstance(item, pytest.Function) else None
    if last and isinstance(run, Runner):
        run.close()


def _workers(item: pytest.Item) -> int:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if "plan" in parameters:
        return int(parameters["plan"].world_size)
    return int(parameters.get("workers", getattr(item.module, "WORKERS_OF_ALL_TESTS", 0)))  # type: ignore[attr-defined]

"""Samplers of other packs are recorded if they treat every element separately, and else refused with the reason. No trace is
left.
"""

from __future__ import annotations

import copy
import importlib
import random
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.denoise.comparing import (
    SEED,
    TOLERANCE,
    comfy_run,
    distance,
    our_program,
    smooth,
    start_latent,
)
from tests.support.programs import FlowSampling, recording, run_of

import comfy.k_diffusion.sampling  # isort: skip
import comfy.model_management  # isort: skip
import comfy.samplers  # isort: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore:Should have t:UserWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
]

SOURCE = Path(__file__).parent / "another_pack"
SIGMAS = torch.tensor([1.0, 0.75, 0.5, 0.2, 0.0])
SAMPLING = FlowSampling(3.0)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Import another pack from a folder outside of this pack."""
    folder = tmp_path_factory.mktemp("pack")
    shutil.copytree(SOURCE, folder / "another_pack", ignore=shutil.ignore_patterns("__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("another_pack")
    for name in [name for name in sys.modules if name.partition(".")[0] == "another_pack"]:
        del sys.modules[name]


def names(table: str) -> list[str]:
    """Return the names of the module's `LOCAL` or `REFUSED`, from another import of the module."""
    from tests.denoise import another_pack

    return list(getattr(another_pack, table))


def run_for(function: Any, cfg: float = 1.7, **options: Any) -> Any:
    sampler = comfy.samplers.KSAMPLER(function, options)
    return run_of(sampler, SAMPLING, SIGMAS.clone(), torch.empty(2, 4, 6, 5), SEED, cfg=cfg)


def state_of(run: Any) -> list[Any]:
    """Return the state that a recording changes for a while, or that the sampler may change."""
    guider, modules = run.guider, ("comfy.k_diffusion.sampling", "another_pack.noise")
    return [
        *(torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()),
        *(dict(vars(guider)), copy.deepcopy(guider.conds), copy.deepcopy(run.extra_args), run.sigmas.tolist()),
        *(set(vars(guider.inner_model)), set(vars(guider.inner_model.diffusion_model))),
        *(dict(vars(sys.modules[name])) for name in modules if name in sys.modules),
    ]


def recorded(function: Any, verdicts: Any = None, **settings: Any) -> Any:
    """Record a sampler, and assert that it leaves no trace."""
    run = run_for(function, **settings)
    before = state_of(run)
    made = recording("chosen").recording_of(run, verdicts or recording("trial").FunctionVerdicts())
    assert state_of(run) == before
    return made


@pytest.mark.parametrize("name", names("LOCAL"))
def test_a_recordable_sampler_gives_comfyuis_result(pack: ModuleType, name: str) -> None:
    function = pack.LOCAL[name]
    made = recorded(function)
    assert made.reason == ""
    x = start_latent(SAMPLING, SIGMAS, batch=2)
    expected = comfy_run(comfy.samplers.KSAMPLER(function), SAMPLING, x, SIGMAS.clone())
    told = [step for step, *_ in expected.told]
    for rows in [(0, 6)], [(0, 2), (2, 3), (3, 6)]:
        parts = [our_program(made.program, x, slice(*each), smooth) for each in rows]
        assert distance(torch.cat([part.result for part in parts], dim=-2), expected.result.float()) <= TOLERANCE
        assert all([each[0] for each in part.told] == told for part in parts)
    assert made.program.shows_steps == (name != "tells_nothing")


@pytest.mark.parametrize("name", names("REFUSED"))
def test_other_samplers_are_refused_with_the_reason_and_leave_no_state(
    pack: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    function, word = pack.REFUSED[name]
    if word.startswith("runs for more than"):
        monkeypatch.setattr(recording("tape"), "SECONDS", 0.5)
        monkeypatch.setattr(recording("tape"), "SECONDS_FOR_A_SIGMA", 0.0)
    options = {"state": pack.memory.Counter()} if name == "counts_in_an_option" else {}
    remembered = pack.memory.remembered()
    made = recorded(function, **options)
    assert made.program is None
    assert made.reason.startswith(f"the sampler {function.__name__}, which {word}"), made.reason
    assert pack.memory.remembered() == remembered
    assert not options or options["state"].count == 0


def test_options_that_cannot_be_copied_are_not_recorded(pack: ModuleType) -> None:
    made = recorded(pack.LOCAL["euler"], lock=(each for each in ()))
    assert made.reason == "the sampler euler, which has an option that cannot be copied"


def test_a_function_is_tried_once_for_each_set_of_options(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, tried = recording("trial"), []
    real = trial._tried
    monkeypatch.setattr(trial, "_tried", lambda run: tried.append(dict(run.sampler.extra_options)) or real(run))
    verdicts, function = trial.FunctionVerdicts(), pack.LOCAL["euler"]
    for options in ({}, {}, {"unknown": 1}, {"unknown": 1}):
        recorded(function, verdicts=verdicts, **options)
    for own in ("euler", "uni_pc"):
        recorded(comfy.samplers.sampler_object(own).sampler_function, verdicts=verdicts)
    assert tried == [{}]  # an option that a step does not accept raises an error before the trial
    assert recorded(function, verdicts=verdicts).program is not None


def test_cancel_ends_a_recording(pack: ModuleType) -> None:
    comfy.model_management.interrupt_current_processing(True)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        recorded(pack.LOCAL["euler"])
    assert recorded(pack.LOCAL["euler"]).program is not None


def test_only_one_sampler_is_recorded_at_a_time() -> None:
    """Two recordings at once would leave the compiler off, as each restores the state that it found."""
    inside, go_on = threading.Event(), threading.Event()
    running: list[int] = []

    def sampler(model: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any, disable: Any, wait: bool) -> Any:
        running.append(len(running))
        if wait:
            inside.set()
            go_on.wait(60)
        running.pop()
        return model(x, sigmas[0] * x.new_ones([x.shape[0]]), **extra_args)

    record, verdicts = recording("chosen").recording_of, recording("trial").FunctionVerdicts()
    threads = [threading.Thread(target=record, args=(run_for(sampler, wait=wait), verdicts)) for wait in (True, False)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    threads[1].join(0.5)
    assert running == [0] and threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join()
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))  # type: ignore[no-untyped-call]
    assert len(compiled) == 1


@pytest.mark.parametrize("name", ["reads_both_branches", "the_other_side_if_asked"])
def test_a_sampler_gets_the_branches_that_it_requests_at_cfg_1(pack: ModuleType, name: str) -> None:
    """A function that does not request the negative prediction is told that there is none."""
    function = pack.LOCAL[name]
    made = recorded(function, cfg=1.0)
    assert made.reads_both_branches == (name != "the_other_side_if_asked")
    x = start_latent(SAMPLING, SIGMAS, batch=2)
    expected = comfy_run(comfy.samplers.KSAMPLER(function), SAMPLING, x, SIGMAS.clone(), cfg=1.0).result
    found = our_program(made.program, x, slice(None), smooth, cfg=1.0, branches=1 + made.reads_both_branches)
    assert distance(found.result, expected) <= TOLERANCE


def test_noise_functions_are_recognised_after_comfyuis_module_was_reloaded(pack: ModuleType) -> None:
    """Another pack reloads the module to list its samplers. Functions imported before are ComfyUI's as well."""
    module = comfy.k_diffusion.sampling
    before = dict(vars(module))
    try:
        importlib.reload(module)
        assert module.default_noise_sampler is not before["default_noise_sampler"]
        for name in ("euler_ancestral", "dpmpp_2m_sde"):
            assert recorded(comfy.samplers.sampler_object(name).sampler_function).reason == ""
        assert recorded(pack.LOCAL["names_bound_at_import"]).reason == ""
    finally:
        vars(module).clear()
        vars(module).update(before)


def test_a_program_that_workers_would_refuse_is_not_recorded(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check also covers ComfyUI's own samplers."""
    checks = importlib.import_module("parallel_backend.denoise.well_formed")
    monkeypatch.setattr(checks, "ENTRIES_FOR_A_SIGMA", 2)
    for function in (pack.LOCAL["euler"], comfy.samplers.sampler_object("euler").sampler_function):
        assert recorded(function).reason == "the sampler euler, which uses operations that the workers cannot replay"

"""A request whose data raises the same error on all ranks fails alone, and the workers continue. If ranks differ, they end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, zeros

from parallel_backend.errors import Refused, RequestFailed, WorkerFailed
from parallel_backend.host.workers.diagnosis import raised_equal_errors
from parallel_backend.host.workers.pending_request import RequestContext
from parallel_backend.plan import ParallelPlan, ResolvedPlan
from parallel_backend.weights.adapters.lora import Adapter, AdapterSet
from parallel_backend.wire.to_host import FailedReply, IssuedOperations
from tests.engine.conftest import Job
from tests.faults.bench import AFTERWARDS, LATENT, Bench
from tests.support.plans import cpu_plan
from tests.support.selection import pairwise, product, thorough

PLANS = {
    "ulysses": cpu_plan(ulysses=2),
    "sharded": cpu_plan(ulysses=2, weights="sharded"),
    "cfg, sharded": cpu_plan(cfg=2, weights="sharded"),
    "data": cpu_plan(data=2),
    "one worker": cpu_plan(),
}
"""All ranks gather sharded weights; the branches of CFG have texts of two lengths."""

TEXT = (21, 13)
"""Token counts of the positive and the negative prompt."""


TENSORS: Mapping[str, Mapping[str, Tensor]] = {
    "forward: texts of another width": {
        "prompt.positive.0.context": zeros(1, 21, 63),
        "prompt.negative.0.context": zeros(1, 13, 63),
    },
    "forward: a latent of too few channels": {"x": zeros(2, 15, 8, 8)},
    "sampler: a mask of another size": {
        "mask": zeros(1, 1, 5, 5),
        "latent": zeros(1, 16, 8, 8),
        "noise": zeros(1, 16, 8, 8),
    },
}
"""Tensors of the message that raise in the forward or in the sampler."""

ADAPTERS: Mapping[str, tuple[str, Mapping[str, Tensor]]] = {
    "adapter: a difference of another shape": ("diff", {"diff": zeros(7, 5)}),
    "adapter: a LoRA whose halves do not fit": ("lora", {"up": zeros(256, 4), "down": zeros(3, 64)}),
}
"""Adapters that raise while the weight of `txt_in` is changed; that of `img_in` has been changed by then."""

VAE: Mapping[str, Callable[[Bench], object]] = {
    "VAE: a latent of too few channels": lambda bench: bench.decode(2, latent=LATENT[:, :15]),
    "VAE: pixels of too many channels": lambda bench: bench.backend.encode(
        bench.vae, ParallelPlan(devices="cpu:2"), "", torch.zeros(1, 4, 1, 64, 64), RequestContext()
    ),
}


def broken(case: str) -> AdapterSet:
    """Return a recipe that changes one weight and raises at the next one."""
    kind, tensors = ADAPTERS[case]
    good = torch.ones(256, 64)
    recipe = {
        "img_in.weight": [Adapter("diff", {"diff": "good"}, 1.0)],
        "txt_in.weight": [Adapter(kind, {part: part for part in tensors}, 1.0)],  # type: ignore[arg-type]
    }
    return AdapterSet(recipe, {"good": good, **tensors})


@pytest.fixture
def job(bench: Bench) -> Job:
    return dataclasses.replace(bench.job, text=TEXT, batch=2)


def assert_request_fails(bench: Bench, job: Job, plan: ResolvedPlan, fails: Callable[[], object]) -> str:
    """Assert that the request fails in one sentence, the same processes live, and the next request's result is as before."""
    right = bench.run(job, plan)
    before = bench.run.workers()
    with pytest.raises(RequestFailed) as failure:
        fails()
    said = str(failure.value)
    who = f"All {plan.world_size} workers" if plan.world_size > 1 else "The worker"
    assert said.startswith(f"{who} raised the same error while "), said
    assert said.endswith("Change the inputs to the model and queue again; the workers keep running.")
    assert "\n" not in said and AFTERWARDS not in said
    assert torch.equal(bench.run(job, plan), right)
    assert bench.run.workers() == before
    return said


@pairwise(case=TENSORS, plan=PLANS)
def test_data_that_raises_in_forward_or_sampler_fails_its_request(bench, job, case, plan):
    assert_request_fails(bench, job, plan, lambda: bench.run(job, plan, replaced=case))


@thorough
def test_texts_that_no_stage_accepts_fail_their_request(bench, job):
    """Every pipeline stage embeds the text, so all ranks raise the same error."""
    plan, texts = cpu_plan(pipefusion=2), TENSORS["forward: texts of another width"]
    assert_request_fails(bench, job, plan, lambda: bench.run(job, plan, replaced=texts))


@product(case=list(ADAPTERS), plan={name: PLANS[name] for name in ("ulysses", "sharded")})
def test_adapters_that_raise_leave_the_weights_unchanged(bench, job, case, plan):
    said = assert_request_fails(bench, job, plan, lambda: bench.run(job, plan, adapters=broken(case)))
    assert "while applying adapters: " in said


@pytest.mark.parametrize("fails", VAE.values(), ids=VAE)
def test_data_that_raises_in_a_vae_fails_its_request(bench, job, fails):
    assert torch.equal(bench.decode(2), bench.picture(2))
    assert_request_fails(bench, job, PLANS["ulysses"], lambda: fails(bench))
    assert torch.equal(bench.decode(2), bench.picture(2))


@thorough
@pytest.mark.parametrize("plan", ["ulysses", "cfg, sharded"])
def test_nine_failing_requests_in_a_row_leave_nothing(bench, job, plan):
    descriptors = []
    for case in (*TENSORS.values(),) * 3:
        assert_request_fails(bench, job, PLANS[plan], lambda case=case: bench.run(job, PLANS[plan], replaced=case))
        descriptors.append([process.num_fds() for process in bench.workers()])
    assert descriptors[-1] == descriptors[0]


SIGMAS = {
    "a zero in the middle": torch.tensor([1.0, 0.5, 0.0, 0.05, 0.0]),
    "two that are almost one": torch.tensor([1.0, 0.45, 0.4499998, 0.2, 0.0]),
}


@pairwise(sigmas=SIGMAS, plan={"ulysses": PLANS["ulysses"], "stages": cpu_plan(pipefusion=2, patches=2)})
def test_noise_that_torchsde_cannot_draw_is_refused(bench, job, plan, sigmas):
    """ComfyUI's own sampler ends in a RecursionError. Here only one rank would raise it, as it draws for the others."""
    right = bench.run(job, plan)
    before = bench.run.workers()
    said = r"^the sampler needs noise from sigma 0\S* to 0\S*, but noise can only be drawn for steps "
    said += r"of 1e-05 or more between sigmas \S+ and 1: choose "
    with pytest.raises(Refused, match=said):
        bench.run(dataclasses.replace(job, sampler="dpmpp_2m_sde", sigmas=sigmas), plan)
    assert torch.equal(bench.run(job, plan), right)
    assert bench.run.workers() == before


UNEQUAL = {
    "the positive side of CFG": (cpu_plan(cfg=2), "positive"),
    "one side of CFG, sharded": (cpu_plan(cfg=2, weights="sharded"), "negative"),
    "one side of CFG, each of two ranks": (cpu_plan(cfg=2, ulysses=2), "negative"),
}
"""Plans under which not all ranks compute with a prompt."""


@pytest.mark.parametrize(
    ("plan", "side"),
    [pytest.param(*case, id=name, marks=() if "sharded" in name else thorough) for name, case in UNEQUAL.items()],
)
def test_an_error_of_only_some_ranks_ends_the_workers(bench, job, plan, side):
    """Other ranks wait for the failed ones. The next run starts new workers."""
    right = bench.run(job, plan)
    with pytest.raises(
        WorkerFailed, match=rf"^Worker \d of {plan.world_size} \(cpu\) failed while sampling, step 1: RuntimeError: "
    ):
        bench.run(job, plan, replaced={f"prompt.{side}.0.context": zeros(1, TEXT[side == "negative"], 63)})
    bench.assert_nothing_left()
    assert torch.equal(bench.run(job, plan), right)


def report(rank: int, *issued: IssuedOperations, **others: Any) -> FailedReply:
    """Return the account of a rank of two that raised a ValueError."""
    fields = {"reason": "ValueError: no", "error": "ValueError", "phase": "sampling", "step": 2} | others
    return FailedReply(rank, "cpu", shortage=None, trace="Traceback ...", failed_at=1.0, issued=[*issued], **fields)


BOTH, PAIR, OWN = (
    IssuedOperations("ulysses", (0, 1), 4),
    IssuedOperations("pipefusion from 0", (0, 1), 3),
    IssuedOperations("cfg", (0,), 1),
)

DIFFERENT: Mapping[str, list[FailedReply]] = {
    "only one rank has failed": [report(0, BOTH)],
    "one has issued more": [report(0, BOTH), report(1, msgspec.structs.replace(BOTH, count=5))],
    "one has issued nothing": [report(0, BOTH), report(1)],
    "what was sent is not received": [report(0, BOTH, PAIR), report(1, BOTH)],
    "errors of two types": [report(0, BOTH), report(1, BOTH, error="KeyError")],
    "in two phases": [report(0, BOTH), report(1, BOTH, phase="decoding")],
    "in two steps": [report(0, BOTH), report(1, BOTH, step=3)],
    "one lost the other": [report(0, BOTH), report(1, BOTH, reason="Connection closed by peer")],
    "one cannot go on": [report(0, BOTH), msgspec.structs.replace(report(1), issued=None)],
    "one rank twice": [report(0, BOTH), report(0, BOTH)],
}


@pytest.mark.parametrize("reports", DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_whose_reports_differ_do_not_continue(reports):
    assert raised_equal_errors([report(0, BOTH, PAIR, OWN), report(1, BOTH, PAIR)], 2)
    assert not raised_equal_errors(reports, 2)

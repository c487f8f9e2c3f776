"""Every requested plan either resolves to one that can run, or is refused with one that does."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.errors import Refused
from parallel_backend.plan import MAX_WORLD_SIZE, ModelLimits, ParallelPlan, ResolvedPlan, Workload
from parallel_backend.plan import resolve as resolve_for
from tests.refusals.of_flux import PLANS

FLUX = ModelLimits(heads=24, head_dim=128, blocks=57)
FOUR_HEADS = ModelLimits(heads=4, head_dim=128, blocks=3)
ONE_SIDED = Workload(batch=1, has_uncond=False, token_rows=64)
TWO_SIDED = Workload(batch=1, has_uncond=True, token_rows=64)
HIDDEN = "(--cuda-device or CUDA_VISIBLE_DEVICES may hide others)."


def resolve(plan: ParallelPlan, gpus: int, limits: ModelLimits, workload: Workload = ONE_SIDED) -> ResolvedPlan:
    return resolve_for(plan, gpus, limits, workload)


def refusal(gpus: int, limits: ModelLimits = FOUR_HEADS, **requested_plan: Any) -> str:
    with pytest.raises(Refused) as refused:
        resolve(ParallelPlan(**requested_plan), gpus, limits)
    return str(refused.value)


@pytest.mark.parametrize(
    ("requested_plan", "gpus", "limits", "devices", "ring", "ulysses", "transport"),
    [
        pytest.param(
            {}, 8, FLUX, 8, 1, 8, "nccl", id="automatic takes every GPU, and Ulysses alone where the heads allow it"
        ),
        pytest.param({}, 8, FOUR_HEADS, 8, 2, 4, "nccl", id="automatic adds a ring where the heads do not"),
        pytest.param({}, 5, FOUR_HEADS, 5, 5, 1, "nccl", id="automatic takes a ring alone for a prime number of GPUs"),
        pytest.param({}, 1, FLUX, 1, 1, 1, "nccl", id="automatic takes a single GPU"),
        pytest.param({}, 0, FLUX, 1, 1, 1, "gloo", id="automatic takes the CPU without GPUs"),
        pytest.param(
            {"ulysses": 2, "ring": 2}, 8, FLUX, 4, 2, 2, "nccl", id="automatic takes as many GPUs as the degrees say"
        ),
        pytest.param({"ulysses": 2}, 8, FLUX, 8, 4, 2, "nccl", id="the degree left open takes the rest"),
        pytest.param({"devices": "0,1,3", "ulysses": 3}, 4, FOUR_HEADS, 3, 1, 3, "nccl", id="heads need not divide"),
        pytest.param({"devices": " CUDA:1 , 0,"}, 2, FLUX, 2, 1, 2, "nccl", id="indices may be written as torch does"),
        pytest.param({"devices": "0,1,0"}, 2, FLUX, 3, 1, 3, "gloo", id="two workers may share a GPU"),
        pytest.param({"devices": "CPU:3", "ring": 3}, 0, FLUX, 3, 3, 1, "gloo", id="workers on the CPU"),
    ],
)
def test_a_plan_that_can_work_resolves(requested_plan, gpus, limits, devices, ring, ulysses, transport):
    """Ranks that share a GPU, or have none, use gloo."""
    plan = resolve(ParallelPlan(**requested_plan), gpus, limits)
    assert (plan.world_size, plan.ring, plan.ulysses, plan.transport) == (devices, ring, ulysses, transport)


@pytest.mark.parametrize(
    ("requested_plan", "gpus", "message"),
    [
        (
            {"devices": "0,2"},
            2,
            f"devices '0,2' asks for GPU 2, but GPUs 0 to 1 are visible: set devices to 0,1 {HIDDEN}",
        ),
        (
            {"devices": "1,3"},
            1,
            f"devices '1,3' asks for GPU 1, 3, but only GPU 0 is visible: set devices to 0 {HIDDEN}",
        ),
        ({"devices": "cpu:-2"}, 0, "devices 'cpu:-2': write cpu:N with N from 1 to 64, such as cpu:2."),
        ({"devices": "cpu:65"}, 0, "devices 'cpu:65': write cpu:N with N from 1 to 64, such as cpu:2."),
        (
            {"devices": "cpu:" + "9" * 5000},
            0,
            f"devices 'cpu:{'9' * 56}...': write cpu:N with N from 1 to 64, such as cpu:2.",
        ),
        (
            {"devices": "9" * 5000},
            2,
            f"devices '{'9' * 60}...' asks for GPU 999999999, but GPUs 0 to 1 are visible: set devices to 0,1 {HIDDEN}",
        ),
        (
            {"devices": ",".join(["0"] * 65)},
            1,
            f"devices '{','.join(['0'] * 30)},...' lists 65 workers; at most 64 are supported: list fewer.",
        ),
        (
            {"ulysses": 2, "ring": 2},
            1,
            "4 workers were asked for (ring 2 x ulysses 2), but only GPU 0 is visible: set ring to 1 and ulysses to 1, or both "
            "to 0 for automatic, or set devices to cpu:4 to try it without GPUs.",
        ),
        (
            {"ulysses": 4, "ring": 64},
            2,
            "256 workers were asked for (ring 64 x ulysses 4), but GPUs 0 to 1 are visible: set ring to 1 and ulysses to 2, or "
            "both to 0 for automatic.",
        ),
        (
            {"devices": "0,1", "ulysses": 2, "ring": 2},
            2,
            "4 workers were asked for (ring 2 x ulysses 2), but 2 devices are there (devices '0,1'): set ring to 1, or to 0 for "
            "automatic.",
        ),
        (
            {"devices": "0-4", "cfg": 1, "ring": 1, "ulysses": 3},
            5,
            "ulysses 3 needs 3 workers or a multiple of that, but 5 devices are there (devices '0-4'): set ring to 5 and "
            "ulysses to 1, or both to 0 for automatic.",
        ),
        (
            {"devices": "0-3", "ring": 2, "ulysses": 1},
            4,
            "ring 2 needs 2 workers, but 4 devices are there (devices '0-3'): set ulysses to 2, or to 0 for automatic.",
        ),
        ({"ulysses": -1}, 2, "ulysses -1 is negative: use 0 (automatic), or 1 or more."),
    ],
)
def test_a_plan_that_cannot_work_is_refused_with_the_numbers(requested_plan, gpus, message):
    assert refusal(gpus, **requested_plan) == message


# workers refuse the two left out here
@pytest.mark.parametrize("case", [case for case in PLANS if case not in ("flash on the CPU", "sage on the CPU")])
def test_a_plan_that_a_prompt_is_refused_for_does_not_resolve(case):
    plan, message = PLANS[case]
    with pytest.raises(Refused, match=f"^{re.escape(message)}$"):
        resolve(ParallelPlan(**plan), 0, FOUR_HEADS, replace(ONE_SIDED, token_rows=4))


def test_a_model_that_needs_the_whole_picture_takes_no_pipefusion():
    limits = replace(FLUX, whole_picture=True)
    for requested_plan in ({"pipefusion": 2}, {"patches": 2, "pipefusion": 1}, {"pipefusion": 2, "patches": 1}):
        with pytest.raises(
            Refused,
            match=r"^pipefusion . with patches . cannot be used with this model, which needs the whole picture at once: ",
        ):
            resolve(ParallelPlan(devices="cpu:2", **requested_plan), 0, limits)
    assert resolve(ParallelPlan(devices="cpu:2"), 0, limits).pipefusion == 1


DEVICES = st.one_of(
    st.just("auto"),
    st.integers(-1, MAX_WORLD_SIZE + 1).map(lambda count: f"cpu:{count}"),
    st.lists(st.integers(0, 9), max_size=9).map(lambda indices: ",".join(map(str, indices))),
    st.text(max_size=8),
)
WISHES = st.builds(
    ParallelPlan,
    devices=DEVICES,
    ulysses=st.integers(-1, MAX_WORLD_SIZE),
    ring=st.integers(-1, MAX_WORLD_SIZE),
    cfg=st.integers(0, 2),
    pipefusion=st.integers(0, 5),
)


@given(
    requested_plan=WISHES,
    gpus=st.integers(0, 16),
    limits=st.builds(
        ModelLimits,
        heads=st.integers(1, 48),
        head_dim=st.just(128),
        blocks=st.integers(1, 60),
        whole_picture=st.booleans(),
    ),
    workload=st.sampled_from((ONE_SIDED, TWO_SIDED)),
)
def test_a_resolved_plan_can_run_and_a_refusal_is_one_sentence_that_suggests_one(
    requested_plan, gpus, limits, workload
):
    try:
        plan = resolve(requested_plan, gpus, limits, workload)
    except Refused as refused:
        sentence = str(refused).replace(repr(requested_plan.devices), "")
        assert sentence.endswith(".") and not re.search(r"[.!?]\s|\n", sentence)
        for suggested in suggestions(str(refused), requested_plan) if workload.has_uncond else ():
            resolve(suggested, gpus, limits, workload)
        return
    product = plan.data * plan.cfg * plan.pipefusion * plan.ring * plan.ulysses
    assert product == len(plan.devices) <= MAX_WORLD_SIZE
    assert sum(plan.stages) == limits.blocks
    assert len(plan.stages) == plan.pipefusion
    assert plan.pipefusion == 1 or not limits.whole_picture
    assert 1 <= plan.ulysses <= limits.heads
    assert requested_plan.ulysses in (0, plan.ulysses)
    assert requested_plan.ring in (0, plan.ring)
    assert all(device == "cpu" or int(device.removeprefix("cuda:")) < gpus for device in plan.devices)


def suggestions(message: str, requested_plan: ParallelPlan) -> list[ParallelPlan]:
    """Return the requested plans that a refusal suggests: with the values that it names, and with 0 for automatic."""
    degrees = {axis: int(value) for axis, value in re.findall(r"(cfg|pipefusion|ulysses|ring|data) to (\d+)", message)}
    found = [msgspec.structs.replace(requested_plan, **degrees)] if degrees else []
    if degrees and "to 0 for automatic" in message:
        # in the node 0 turns PipeFusion off, unless a preset chooses it
        automatic = {axis: 1 if axis == "pipefusion" else 0 for axis in degrees}
        found.append(msgspec.structs.replace(requested_plan, **automatic))
    if match := re.search(r"set devices to (cpu:\d+) to try", message):
        found.append(msgspec.structs.replace(requested_plan, devices=match[1]))
    if match := re.search(r"visible: set devices to (\S+) \(", message):
        found.append(ParallelPlan(devices=match[1]))
    return found


@pytest.mark.parametrize(
    ("requested_plan", "job", "message"),
    [
        ({"cfg": 2}, ONE_SIDED, "cfg 2 needs a negative prompt"),
        ({"cfg": 3}, TWO_SIDED, "use cfg 2 or 1"),
        ({"weights": "spread"}, ONE_SIDED, "use replicated, sharded or streamed"),
        ({"patches": -1}, ONE_SIDED, "cannot be negative"),
    ],
)
def test_each_axis_is_refused_where_it_cannot_work(requested_plan, job, message):
    with pytest.raises(Refused, match=re.escape(message)):
        resolve(ParallelPlan(devices="cpu:4", **requested_plan), 0, FOUR_HEADS, job)


def test_sharded_weights_need_a_gpu_for_each_worker():
    message = "devices '1,0,1' puts several on one: use weights replicated, or name each GPU once."
    with pytest.raises(Refused, match=re.escape(message)):
        resolve(ParallelPlan(devices="1,0,1", weights="sharded"), 2, FLUX)
    assert resolve(ParallelPlan(devices="1,0,1"), 2, FLUX).transport == "gloo"
    assert resolve(ParallelPlan(devices="1,0", weights="sharded"), 2, FLUX).transport == "nccl"


def test_automatic_uses_cfg_only_where_there_is_a_negative():
    assert resolve(ParallelPlan(devices="cpu:4"), 0, FOUR_HEADS, TWO_SIDED).degrees == "cfg 2 x ulysses 2"
    assert resolve(ParallelPlan(devices="cpu:4"), 0, FOUR_HEADS, ONE_SIDED).degrees == "ulysses 4"


@pytest.mark.parametrize(("rows", "patches"), [(64, 3), (2, 2), (1, 1)])
def test_automatic_patches_equal_the_smaller_of_stages_and_rows(rows, patches):
    requested_plan = ParallelPlan(devices="cpu:3", pipefusion=3)
    assert resolve(requested_plan, 0, FOUR_HEADS, replace(ONE_SIDED, token_rows=rows)).patches == patches


def test_ranks_and_mesh_coordinates_map_to_each_other():
    plan = resolve(ParallelPlan(devices="cpu:24", cfg=2, pipefusion=3, ring=1, ulysses=4), 0, FOUR_HEADS, TWO_SIDED)
    places = [plan.coordinates(rank) for rank in range(plan.world_size)]
    assert places == list(product(*map(range, plan.mesh_shape)))
    assert [plan.rank_at(place) for place in places] == list(range(plan.world_size))

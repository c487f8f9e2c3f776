"""Plans: every wish either resolves to one that can run, or is refused with one that does."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.errors import Refused
from parallel_backend.plan import MAX_WORLD_SIZE, ModelLimits, ParallelPlan, largest_divisor, resolve

FLUX = ModelLimits(heads=24, head_dim=128)
FOUR_HEADS = ModelLimits(heads=4, head_dim=128)
NO_GPU = "asks for GPU 0, but none is visible: use cpu:2 "
HIDDEN = "(ComfyUI hides GPUs that --cuda-device or CUDA_VISIBLE_DEVICES leave out)."
NOT_UNDERSTOOD = 'is not understood: write "auto", GPU indices such as "0,1", or "cpu:2".'


def refusal(gpus: int, limits: ModelLimits = FOUR_HEADS, **wish: Any) -> str:
    with pytest.raises(Refused) as refused:
        resolve(ParallelPlan(**wish), gpus, limits)
    return str(refused.value)


@pytest.mark.parametrize(
    ("wish", "gpus", "limits", "devices", "ring", "ulysses"),
    [
        pytest.param({}, 8, FLUX, 8, 1, 8, id="automatic takes every GPU, and Ulysses alone where the heads allow it"),
        pytest.param({}, 8, FOUR_HEADS, 8, 2, 4, id="automatic adds a ring where the heads do not"),
        pytest.param({}, 5, FOUR_HEADS, 5, 5, 1, id="automatic takes a ring alone for a prime number of GPUs"),
        pytest.param({}, 0, FLUX, 1, 1, 1, id="automatic takes the CPU without GPUs"),
        pytest.param({"ulysses": 2, "ring": 2}, 8, FLUX, 4, 2, 2, id="automatic takes as many GPUs as the degrees say"),
        pytest.param({"ulysses": 2}, 8, FLUX, 8, 4, 2, id="the degree left open takes the rest"),
        pytest.param({"devices": "0,1,3", "ulysses": 3}, 4, FOUR_HEADS, 3, 1, 3, id="heads need not divide"),
        pytest.param({"devices": " CUDA:1 , 0,"}, 2, FLUX, 2, 1, 2, id="indices may be written as torch does"),
        pytest.param({"devices": "0,0"}, 1, FLUX, 2, 1, 2, id="two workers may share a GPU"),
        pytest.param({"devices": "CPU:3", "ring": 3}, 0, FLUX, 3, 3, 1, id="workers on the CPU"),
    ],
)
def test_a_plan_that_can_work_resolves(wish, gpus, limits, devices, ring, ulysses):
    plan = resolve(ParallelPlan(**wish), gpus, limits)
    assert (plan.world_size, plan.ring, plan.ulysses) == (devices, ring, ulysses)


@pytest.mark.parametrize(
    ("devices", "gpus", "transport"),
    [("0,1", 2, "nccl"), ("0", 1, "nccl"), ("0,0", 1, "gloo"), ("0,1,0", 2, "gloo"), ("cpu:2", 2, "gloo")],
)
def test_ranks_that_share_a_gpu_or_have_none_talk_through_gloo(devices, gpus, transport):
    assert resolve(ParallelPlan(devices=devices), gpus, FLUX).transport == transport


@pytest.mark.parametrize(
    ("wish", "gpus", "message"),
    [
        ({"devices": "0"}, 0, f"devices '0' {NO_GPU}{HIDDEN}"),
        ({"devices": "0,2"}, 2, f"devices '0,2' asks for GPU 2, but GPUs 0 to 1 are visible: use 0,1 {HIDDEN}"),
        ({"devices": "1,3"}, 1, f"devices '1,3' asks for GPU 1, 3, but only GPU 0 is visible: use 0 {HIDDEN}"),
        ({"devices": "banana"}, 2, f"devices 'banana' {NOT_UNDERSTOOD}"),
        ({"devices": "0;1"}, 2, f"devices '0;1' {NOT_UNDERSTOOD}"),
        ({"devices": "-1"}, 2, f"devices '-1' {NOT_UNDERSTOOD}"),
        ({"devices": ""}, 2, f"devices '' {NOT_UNDERSTOOD}"),
        ({"devices": "cpu:0"}, 0, "devices 'cpu:0': write cpu:N with N from 1 to 64, such as cpu:2."),
        ({"devices": "cpu:-2"}, 0, "devices 'cpu:-2': write cpu:N with N from 1 to 64, such as cpu:2."),
        ({"devices": "cpu:65"}, 0, "devices 'cpu:65': write cpu:N with N from 1 to 64, such as cpu:2."),
        ({"devices": ",".join(["0"] * 65)}, 1, "devices lists 65 workers; at most 64 are supported."),
        (
            {"ulysses": 4, "ring": 1},
            0,
            "ring 1 x ulysses 4 needs 4 devices and no GPU is visible: lower the degrees to a product of 1, "
            "or write cpu:4 into devices.",
        ),
        (
            {"ulysses": 2, "ring": 2},
            1,
            "ring 2 x ulysses 2 needs 4 devices and 1 GPU is visible: lower the degrees to a product of 1, "
            "or write cpu:4 into devices.",
        ),
        (
            {"ulysses": 64, "ring": 64},
            2,
            "ring 64 x ulysses 64 needs 4096 devices and 2 GPUs are visible: lower the degrees to a product of 2.",
        ),
        (
            {"devices": "cpu:2", "ulysses": 3},
            0,
            "ulysses 3 does not come to the 2 workers of devices 'cpu:2': use ring 1 x ulysses 2, set both to 0 "
            "(automatic), or choose other devices.",
        ),
        (
            {"devices": "0,1", "ulysses": 2, "ring": 2},
            2,
            "ring 2 x ulysses 2 does not come to the 2 workers of devices '0,1': use ring 1 x ulysses 2, set both to 0 "
            "(automatic), or choose other devices.",
        ),
        (
            {"devices": "cpu:8", "ulysses": 8},
            0,
            "ulysses 8 is more than the model's 4 attention heads: use ring 2 x ulysses 4.",
        ),
        (
            {"devices": "cpu:8", "ring": 1},
            0,
            "ring 1 on 8 workers leaves ulysses 8, more than the model's 4 attention heads: use ring 2 x ulysses 4.",
        ),
        ({"ulysses": -1}, 2, "ulysses -1 is no degree: use 0 for automatic, or 1 and more."),
        ({"ring": -2}, 2, "ring -2 is no degree: use 0 for automatic, or 1 and more."),
    ],
)
def test_a_plan_that_cannot_work_is_refused_with_the_numbers(wish, gpus, message):
    assert refusal(gpus, **wish) == message


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
)
GPUS = st.integers(0, 16)
LIMITS = st.builds(ModelLimits, heads=st.integers(1, 48), head_dim=st.just(128))


@given(wish=WISHES, gpus=GPUS, limits=LIMITS)
def test_what_resolves_can_run_and_what_does_not_names_a_plan_that_does(wish, gpus, limits):
    try:
        plan = resolve(wish, gpus, limits)
    except Refused as refused:
        for devices, ring, ulysses in suggestions(str(refused), wish, limits):
            suggested = resolve(ParallelPlan(devices=devices, ring=ring, ulysses=ulysses), gpus, limits)
            assert (suggested.ring, suggested.ulysses) == (ring or suggested.ring, ulysses or suggested.ulysses)
        return
    assert plan.ring * plan.ulysses == len(plan.devices) <= MAX_WORLD_SIZE
    assert 1 <= plan.ulysses <= limits.heads
    assert wish.ulysses in (0, plan.ulysses)
    assert wish.ring in (0, plan.ring)
    assert all(device == "cpu" or int(device.removeprefix("cuda:")) < gpus for device in plan.devices)


def suggestions(message: str, wish: ParallelPlan, limits: ModelLimits) -> list[tuple[str, int, int]]:
    """The plans (devices, ring, ulysses) that a refusal suggests; 0 where it leaves the choice."""
    found = []
    if match := re.search(r"use ring (\d+) x ulysses (\d+)", message):
        found.append((wish.devices, int(match[1]), int(match[2])))
    if match := re.search(r"lower the degrees to a product of (\d+)", message):
        found.append((wish.devices, int(match[1]), 1))
    if match := re.search(r"write (cpu:\d+) into devices", message):
        found.append((match[1], wish.ring, wish.ulysses) if wish.ulysses <= limits.heads else (match[1], 0, 0))
    if match := re.search(r"visible: use (\S+) \(", message):
        found.append((match[1], 0, 0))
    return found


@given(wish=WISHES, gpus=GPUS, limits=LIMITS)
def test_a_refusal_is_one_sentence(wish, gpus, limits):
    try:
        resolve(wish, gpus, limits)
    except Refused as refused:
        message = str(refused).replace(repr(wish.devices), "")
        assert message.endswith(".")
        assert not re.search(r"[.!?]\s|\n", message)


@given(number=st.integers(1, 500), limit=st.integers(1, 100))
def test_the_largest_divisor_divides_and_none_larger_does(number, limit):
    found = largest_divisor(number, limit)
    assert number % found == 0
    assert found <= limit
    assert not [d for d in range(found + 1, min(number, limit) + 1) if number % d == 0]

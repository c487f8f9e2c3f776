"""Devices as people write them, the GPUs that `auto` takes on machines with several kinds, and the presets of Parallel Plan."""

from __future__ import annotations

import dataclasses

import pytest

from parallel_backend.errors import Refused
from parallel_backend.gpus import Gpu
from parallel_backend.host.planning.devices import select_gpus, selection_note
from parallel_backend.plan import ModelLimits, ParallelPlan, Workload, resolve
from parallel_backend.plan.devices import named_devices
from parallel_backend.plan.plan import AUTOMATIC, PRESETS, SLOW_LINKS, SMALLEST, with_preset
from parallel_backend.plan.resolve import is_automatic

ZEROS = ParallelPlan(pipefusion=0, warmup_steps=0)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_compiles_and_exchanges_in_fp8_only_if_the_user_says_so(preset: str) -> None:
    for mine, exchange, compiler in (
        (ZEROS, "exact", ""),
        (ParallelPlan(exchange="fp8"), "fp8", ""),
        (ParallelPlan(compile="on"), "exact", "inductor"),
    ):
        plan = with_preset(preset, mine)
        assert (plan.exchange, plan.compiler) == (exchange, compiler)


def test_presets_choose_automatic_values() -> None:
    assert with_preset(AUTOMATIC, ZEROS) == ParallelPlan()
    assert with_preset(SMALLEST, ZEROS) == ParallelPlan(weights="streamed")
    assert with_preset(SLOW_LINKS, ZEROS) == ParallelPlan(pipefusion=0)


@pytest.mark.parametrize("preset", PRESETS)
def test_values_that_the_user_sets_win_over_every_preset(preset: str) -> None:
    mine = ParallelPlan(
        devices="0,1",
        cfg=1,
        pipefusion=2,
        ulysses=1,
        ring=1,
        data=1,
        patches=4,
        warmup_steps=3,
        stages="1,2",
        weights="sharded",
    )
    assert with_preset(preset, mine) == mine


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("all", ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("0-1", ("cuda:0", "cuda:1")),
        ("3, 0-1", ("cuda:3", "cuda:0", "cuda:1")),
        ("cuda:1 - cuda:2", ("cuda:1", "cuda:2")),
    ],
)
def test_ranges_of_gpus_are_understood(text: str, devices: tuple[str, ...]) -> None:
    assert named_devices(text, 4) == devices
    assert named_devices("all", 0) == ("cpu",)


@pytest.mark.parametrize("text", ["1-", "-1", "2-1", "0-1-2", "0-x", "-"])
def test_a_malformed_range_and_one_beyond_the_machine_are_refused(text: str) -> None:
    with pytest.raises(Refused, match="is not understood"):
        named_devices(text, 4)
    with pytest.raises(Refused, match=r"'2-5' asks for GPU 4, 5, but GPUs 0 to 3 are visible: set devices to 0,1,2,3"):
        named_devices("2-5", 4)
    with pytest.raises(Refused, match="asks for GPU"):
        named_devices("0-999999999999", 4)


RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", 25_300_000_000, None, (8, 9), 128, False)
RTX_3090 = Gpu("NVIDIA GeForce RTX 3090", 25_300_000_000, None, (8, 6), 82, False)
RTX_A4500 = Gpu("NVIDIA RTX A4500", 21_100_000_000, None, (8, 6), 56, False)
TITAN_RTX = Gpu("NVIDIA TITAN RTX", 25_200_000_000, None, (7, 5), 72, False)
GT_1030 = Gpu("NVIDIA GeForce GT 1030", 2_100_000_000, None, (6, 1), 3, False)
A100 = Gpu("NVIDIA A100-SXM4-80GB", 85_000_000_000, None, (8, 0), 108, False)
A100_40 = Gpu("NVIDIA A100-SXM4-40GB", 42_400_000_000, None, (8, 0), 108, False)


def shown(gpu: Gpu) -> Gpu:
    return dataclasses.replace(gpu, display=True)


@pytest.mark.parametrize(
    ("gpus", "used"),
    [
        ([RTX_4090], (0,)),
        ([RTX_4090] * 4, (0, 1, 2, 3)),
        ([shown(RTX_4090), RTX_4090], (0, 1)),  # a desktop costs less than half of the speed
        ([GT_1030, RTX_4090, RTX_4090], (1, 2)),
        ([RTX_4090, TITAN_RTX], (0,)),  # 72 multiprocessors of an older generation against 128
        ([RTX_4090, RTX_4090, RTX_3090], (0, 1, 2)),  # the slower card gets fewer tokens
        ([A100, A100, Gpu("NVIDIA L40", 48e9, None, (8, 9), 142, True)], (0, 1, 2)),
        ([A100, A100, A100_40], (0, 1)),  # 42 GB are less than half of 85
        ([RTX_3090, RTX_3090, shown(RTX_A4500)], (0, 1, 2)),
    ],
)
def test_a_card_that_makes_all_slower_is_left_out(gpus, used):
    assert select_gpus(gpus) == used


def test_a_note_names_gpus_that_are_left_out_and_the_way_to_use_them():
    assert selection_note([shown(GT_1030), RTX_4090, RTX_4090], (1, 2)) == (
        "devices auto leaves out GPU 0 (NVIDIA GeForce GT 1030, 3 multiprocessors, 2.1 GB, with a display): a GPU that "
        "is less than a third as fast as the fastest, or has less than half of the largest one's memory, would hold up GPUs 1, "
        "2; write 0,1,2 into devices of Parallel Plan to use all."
    )


@pytest.mark.parametrize(("degrees", "devices"), [({}, ("cuda:1", "cuda:2")), ({"ulysses": 1, "ring": 1}, ("cuda:1",))])
def test_automatic_devices_are_chosen_among_the_named_gpus(degrees, devices):
    requested_plan = ParallelPlan(devices="auto:1,2", **degrees)
    assert is_automatic(requested_plan)
    assert resolve(requested_plan, 3, ModelLimits(24, 128, 57), Workload(1, False, 64)).devices == devices

"""The GPUs that `auto` takes on machines with several kinds, and the note on the others."""

from __future__ import annotations

import dataclasses

import pytest

from parallel_backend.gpus import Gpu
from parallel_backend.host.planning.devices import select_gpus, selection_note
from parallel_backend.plan import ModelLimits, ParallelPlan, Workload, resolve
from parallel_backend.plan.resolve import is_automatic

RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", 25_300_000_000, None, (8, 9), 128, False)
RTX_3090 = Gpu("NVIDIA GeForce RTX 3090", 25_300_000_000, None, (8, 6), 82, False)
RTX_3080 = Gpu("NVIDIA GeForce RTX 3080", 10_500_000_000, None, (8, 6), 68, False)
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
        ([RTX_4090, RTX_3090], (0, 1)),
        ([RTX_4090, TITAN_RTX], (0,)),  # 72 multiprocessors of an older generation against 128
        ([RTX_4090, RTX_4090, RTX_3090], (0, 1, 2)),  # the slower card gets fewer tokens
        ([A100, A100, Gpu("NVIDIA L40", 48e9, None, (8, 9), 142, True)], (0, 1, 2)),
        ([A100, A100, A100_40], (0, 1)),  # 42 GB are less than half of 85
        ([RTX_3090, RTX_3080], (0,)),  # 10 GB are less than half of 25
        ([RTX_3090, RTX_3090, RTX_A4500], (0, 1, 2)),
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

"""The presets of Parallel Plan, and devices as people write them."""

from __future__ import annotations

import pytest

from parallel_backend.errors import Refused
from parallel_backend.plan import ParallelPlan
from parallel_backend.plan.devices import named_devices
from parallel_backend.plan.plan import AUTOMATIC, PRESETS, SLOW_LINKS, SMALLEST, with_preset

ZEROS = ParallelPlan(pipefusion=0, warmup_steps=0)


def test_zero_everywhere_is_the_default_plan() -> None:
    assert with_preset(AUTOMATIC, ZEROS) == ParallelPlan()


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
def test_a_malformed_range_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="is not understood"):
        named_devices(text, 4)


def test_a_range_beyond_the_machine_is_refused() -> None:
    with pytest.raises(Refused, match=r"devices '2-5' asks for GPU 4, 5, but GPUs 0 to 3 are visible: use 0,1,2,3"):
        named_devices("2-5", 4)
    with pytest.raises(Refused, match="asks for GPU"):
        named_devices("0-999999999999", 4)

"""The cost of a ControlNet to a run with one device for each branch, and the warning where this cost exceeds the gain."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from parallel_backend.conditioning import Conditioning
from parallel_backend.host.planning.events import CostEvent, PlanEvent
from parallel_backend.plan.choose import PlanChoice, Ranked
from tests.support.nodes_module import nodes_module
from tests.support.plans import cpu_plan

TWO = msgspec.structs.replace(cpu_plan(cfg=2), devices=("cuda:0", "cuda:1"))
ONE = msgspec.structs.replace(cpu_plan(), devices=("cuda:0",))
NOTHING: Any = None


@dataclass(frozen=True)
class Reported:
    """The one field of a rank's report that the cost reads."""

    seconds: float


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return nodes_module("model.features.controlnet_costs", monkeypatch)


def planned(one: float, two: float) -> PlanEvent:
    """Return a plan with predictions of a step's seconds on one device and with one device for each branch."""
    ranking = [Ranked(TWO, two, NOTHING), Ranked(ONE, one, NOTHING)]
    return PlanEvent(NOTHING, PlanChoice(TWO, ranking, ranking[1], "", False), ())


def test_the_seconds_that_the_second_device_saves_are_predicted(costs: ModuleType) -> None:
    assert costs.saved_by_cfg(TWO, planned(1.0, 0.625)) == 0.375
    assert costs.saved_by_cfg(TWO, planned(1.0, 1.25)) == -0.25
    assert costs.saved_by_cfg(TWO, None) is None
    assert costs.saved_by_cfg(ONE, planned(1.0, 0.625)) is None
    assert costs.saved_by_cfg(cpu_plan(cfg=2), planned(1.0, 0.625)) is None


def test_the_cost_of_a_request_is_its_time_beyond_the_slowest_ranks(costs: ModuleType) -> None:
    """The first request, during which the workers load weights, does not count."""
    found = costs.ControlCosts(requests=[9.0, 1.0, 1.5])
    reports: list[Any] = [
        [Reported(0.1), Reported(0.2)],
        [Reported(0.25), Reported(0.5)],
        [Reported(0.5), Reported(0.25)],
    ]
    assert found.sending([CostEvent(TWO, each) for each in reports]) == 0.75
    assert costs.ControlCosts(requests=[9.0]).sending([CostEvent(TWO, reports[0])]) == 0


def test_only_the_bytes_of_controlnet_tensors_are_counted(costs: ModuleType) -> None:
    found = costs.ControlCosts()
    tensors = {"x": torch.zeros(7), "control.output.0": torch.zeros(2, 5), "control.input.1": torch.zeros(3)}
    with found.request([Conditioning(tensors), Conditioning({"control.middle.0": torch.zeros(4)})]):
        time.sleep(0.01)
    assert found.sent == 4 * (10 + 3 + 4)
    assert found.requests[0] >= 0.01


def test_the_node_warns_if_a_controlnet_costs_more_than_the_second_device_saves(costs: ModuleType) -> None:
    found = costs.ControlCosts(sent=60_000_000)
    assert found.warning(20, 0.5, 0.25) == (
        "Sending the ControlNet's output (3.00 MB a step) takes 0.50 s a step and cfg 2 saves 0.25 s: choose one device in "
        "Parallel Plan."
    )
    assert "cfg 2 saves 0.00 s" in found.warning(20, 0.5, -0.25)
    assert found.warning(20, 0.25, 0.25) is None
    assert found.warning(20, 0.5, None) is None

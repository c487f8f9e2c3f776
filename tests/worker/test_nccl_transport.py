"""NCCL's ways through host memory: tried once in processes of their own, the fastest kept, none where it is not the question."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from parallel_backend.host.planning.measurements import Measurements
from parallel_backend.host.workers.pending_request import RequestReply
from parallel_backend.wire.frames import Frame
from parallel_backend.wire.to_host import MeasureMachineReply
from parallel_backend.worker.process.environment import Environment, LaunchedWorker
from parallel_backend.worker.process.nccl_transport import (
    benchmark_transports,
    cached_transport,
    has_transports,
    through_host,
)
from parallel_backend.worker.process.process_group import ProcessGroup
from scripts.comfyui import REPO
from tests.support.plans import MEASURED, cpu_plan
from tests.support.ranks import run_ranks
from tests.support.selection import thorough

CPU = torch.device("cpu")
FAILS = {"GLOO_SOCKET_IFNAME": "none-of-this-name"}
WORKS = {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPO))


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        pytest.param(({}, FAILS), {}, id="NCCL's own where the other fails", marks=thorough),
        pytest.param((FAILS, WORKS), WORKS, id="the other where it is faster"),
    ],
)
def test_the_fastest_is_kept(tmp_path: Path, ways: tuple[Mapping[str, str], ...], expected: Mapping[str, str]) -> None:
    marks = 0

    def mark() -> None:
        nonlocal marks
        marks += 1

    def tried(rank: int) -> tuple[dict[str, str], list[float], int, bool, bool]:
        group = group_of(rank, tmp_path)
        way = benchmark_transports(group, CPU, mark, ways)
        group.broadcast_flag(True)  # rank 0 has kept it
        return way.settings, [*way.speeds], marks, cached_transport(2) == way, has_transports(group, (0, 0), CPU)

    for settings, speeds, progress, kept, more in run_ranks(2, tried, joined=False):
        assert settings == expected
        assert [speed > 0 for speed in speeds] == [each is not FAILS for each in ways]
        assert progress == len(ways)
        assert kept
        assert not more


@pytest.mark.parametrize(
    ("devices", "machines", "variables", "reaching", "expected"),
    [
        (("cuda:0", "cuda:1"), (0, 0), ("PATH",), (), True),
        (("cuda:0", "cuda:1"), (0, 0), ("NCCL_P2P_DISABLE",), (), False),
        (("cuda:0", "cuda:1"), (0, 0), ("NCCL_SHM_DISABLE",), (), False),
        (("cuda:0", "cuda:1"), (0, 0), (), (("cuda:1", "cuda:0"),), False),
        (("cuda:0", "cuda:1", "cuda:2"), (0, 0, 0), (), (("cuda:0", "cuda:2"),), False),
        (("cuda:0", "cuda:0"), (0, 1), (), (), False),
        (("cuda:0", "cuda:1"), (0, 1), (), (), False),
        (("cuda:0", "cuda:0"), (0, 0), (), (), False),
        (("cuda:0",), (0,), (), (), False),
        (("cpu", "cpu"), (0, 0), (), (), False),
        (("cuda:0", "cpu"), (0, 0), (), (), False),
    ],
)
def test_ways_are_tried_where_all_that_is_exchanged_goes_through_the_host(
    devices: tuple[str, ...],
    machines: tuple[int, ...],
    variables: tuple[str, ...],
    reaching: tuple[tuple[str, str], ...],
    expected: bool,
) -> None:
    assert through_host(devices, machines, variables, lambda *pair: pair in reaching) == expected


def test_what_workers_measure_on_a_slower_way_is_not_taken() -> None:
    """Those that measured it are ended, and those that start then are asked."""
    measured = [replace(MEASURED, link_bandwidth=bandwidth) for bandwidth in (1e9, 2e9)]
    answers = [MeasureMachineReply(0, measured[0], restart_is_faster=True), MeasureMachineReply(1, measured[1])]
    ended: list[tuple[str, ...]] = []
    measurements = Measurements(
        ask=lambda exchange: RequestReply(Frame(answers.pop(0), {}), []),
        number=itertools.count().__next__,
        end=ended.append,
        on_event=lambda event: None,
    )
    plan = cpu_plan(ulysses=2)
    assert measurements.measure(plan, lambda: False) == measured[1]
    assert ended == [plan.devices]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_gpus_that_reach_each_other_have_none(tmp_path: Path) -> None:
    def asked(rank: int) -> tuple[bool, bool]:
        reaches = torch.cuda.can_device_access_peer(0, 1)
        return has_transports(group_of(rank, tmp_path), (0, 0), torch.device("cuda", rank)), reaches

    for tries, reaches in run_ranks(2, asked, joined=False):
        assert tries != reaches


def group_of(rank: int, folder: Path) -> ProcessGroup:
    """Two ranks, each with its CPU."""
    environment = Environment(rank, 2, CPU, LaunchedWorker("", "", 1, -1, ""), (), "", None)
    return ProcessGroup(environment, dist.FileStore(str(folder / "store"), 2))

"""Measurements of a machine by its workers, and the files that keep them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from parallel_backend.attention.kernels import choose_kernel
from parallel_backend.comm.meter import Meter
from parallel_backend.mesh import build_mesh
from parallel_backend.plan.predict.cards import card_of
from parallel_backend.plan.predict.known_machines import profile
from parallel_backend.plan.predict.measure import (
    HEAD_DIM,
    BlockTimes,
    Machine,
    cached,
    machine_key,
    measure,
    measured_profile,
)
from tests.support.plans import MEASURED, cpu_plan
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def test_all_ranks_get_the_same_measurements() -> None:
    attend = choose_kernel("auto", CPU, torch.float32, HEAD_DIM).attend

    def on(rank: int) -> bytes:
        mesh = build_mesh(cpu_plan(ulysses=3), CPU, Meter())
        return msgspec.json.encode(measure(CPU, mesh.ulysses, rank, ["a CPU"] * 3, attend))

    answers = run_ranks(3, on)
    assert len(set(answers)) == 1
    machine = msgspec.json.decode(answers[0], type=Machine)
    assert machine.ranks == 3
    assert machine.kinds == ("a CPU",) * 3
    assert all(getattr(machine, field) > 0 for field in Machine.__struct_fields__ if field != "kinds")
    assert machine.connection == 2  # the largest of all ranks
    found = measured_profile(machine, (8e9, 9e9, 8e9), gpus=False)
    assert (found.device.memory, found.device.context, found.device.connection) == (8e9, 0, 2)
    (level,) = found.levels
    assert (level.size, level.bandwidth, level.latency) == (3, machine.link_bandwidth, machine.link_latency)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["NVIDIA GeForce RTX 4090"] * 2, {"fp8_fast", "int8"}),
        (["NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 4090"], {"fp8_fast", "int8"}),
        (["NVIDIA GeForce RTX 3090"] * 2, {"int8"}),
        (["NVIDIA GeForce RTX 4090", "a card of next year"], set()),
    ],
)
def test_quantised_rates_of_measured_gpus_keep_their_cards_ratio_to_bf16(kinds: list[str], expected: set[str]) -> None:
    machine = msgspec.structs.replace(MEASURED, kinds=tuple(kinds), matmul=100e12)
    device = measured_profile(machine, (8e9, 8e9), gpus=True).device
    assert set(device.quantised) == expected
    for dtype in expected:
        known = [profile(card).device for card in map(card_of, kinds) if card]
        ratio = min(card.quantised[dtype] / card.matmul for card in known)
        assert device.matmul_rate(dtype) == pytest.approx(100e12 * ratio * device.reached)
    assert not measured_profile(machine, (8e9, 8e9), gpus=False).device.quantised


def test_a_machine_is_measured_once(tmp_path: Path) -> None:
    assert len({machine_key(*of) for of in ((["cpu", "cpu"], "auto"), (["cpu"], "auto"), (["cpu"], "sage"))}) == 3
    calls: list[int] = []

    def find() -> Machine:
        calls.append(1)
        return MEASURED

    folder = tmp_path / "new"
    assert cached("two cards", Machine, find, folder) == cached("two cards", Machine, find, folder) == MEASURED
    assert len(calls) == 1
    cached("two other cards", Machine, find, folder)
    assert len(calls) == 2
    times = BlockTimes(((1.0, 2.0),), (1, 2))
    assert cached("two cards", BlockTimes, lambda: times, folder) == times


def test_a_damaged_file_is_measured_again_and_a_read_only_folder_does_no_harm(tmp_path: Path) -> None:
    cached("cards", Machine, lambda: MEASURED, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text("{")
    other = msgspec.structs.replace(MEASURED, launch=1.0)
    assert cached("cards", Machine, lambda: other, tmp_path) == other
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert cached("cards", Machine, lambda: MEASURED, blocked / "below") == MEASURED

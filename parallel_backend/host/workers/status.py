"""What the workers do now, for those who look on while they do it; nothing here waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...diffusion import ModelSpec
from ...wire.to_host import RankCostReply
from .channel import Heard


class Held(msgspec.Struct, frozen=True):
    """A model's name and the bytes of its weights on a device."""

    model: str
    nbytes: int


class RankStatus(msgspec.Struct, frozen=True):
    """One rank: the phase and step that it last told of, whether it waits for others, and what it holds.

    `on_host` are the bytes of weights that wait in host memory.
    """

    rank: int
    device: str
    phase: str
    step: int
    waiting: bool
    held: list[Held]
    on_host: int


class GroupStatus(msgspec.Struct, frozen=True):
    """The workers on some devices: `starting`, `ready`, `running` or `failed`; `model` is what they work on."""

    state: str
    model: str
    ranks: list[RankStatus]


class Failure(msgspec.Struct, frozen=True):
    """A worker's failure, as the user was told of it, and when (seconds since the epoch)."""

    text: str
    at: float


class BackendStatus(msgspec.Struct, frozen=True):
    """All workers. `runs` counts the runs that are done; `failure` is that of the last run, if it failed."""

    groups: list[GroupStatus]
    runs: int
    failure: Failure | None


def rank_statuses(
    devices: Sequence[str], heard: Mapping[int, Heard], latest: Mapping[int, RankCostReply]
) -> list[RankStatus]:
    """The ranks of a group by their last heartbeats and reports."""
    return [_rank_status(rank, device, heard.get(rank), latest.get(rank)) for rank, device in enumerate(devices)]


def starting(devices: Sequence[str]) -> GroupStatus:
    """A group that is not up yet."""
    return GroupStatus("starting", "", rank_statuses(devices, {}, {}))


def model_name(model: ModelSpec) -> str:
    """A model as people know it: its file's name."""
    return Path(model.path).name


def _rank_status(rank: int, device: str, heard: Heard | None, report: RankCostReply | None) -> RankStatus:
    heartbeat = heard.heartbeat if heard else None
    return RankStatus(
        rank=rank,
        device=device,
        phase=heartbeat.phase if heartbeat else "starting",
        step=heartbeat.step if heartbeat else 0,
        waiting=heartbeat.waiting if heartbeat else False,
        held=[Held(model_name(entry.model), entry.nbytes) for entry in report.models_on_device] if report else [],
        on_host=report.on_host if report else 0,
    )

"""The current state of the workers, for observers. Nothing here waits for the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...diffusion import ModelSpec
from ...wire.to_host import RankCostReply
from .channel import Heard


class HeldModel(msgspec.Struct, frozen=True):
    """A model's name and the bytes of its weights on a device."""

    model: str
    nbytes: int


class RankStatus(msgspec.Struct, frozen=True):
    """The state of one rank.

    Attributes:
        phase, step: as in the rank's last heartbeat.
        waiting: True if the rank waits for other ranks.
        held: the models whose weights are on the device.
        on_host: bytes of weights that wait in host memory.
    """

    rank: int
    device: str
    phase: str
    step: int
    waiting: bool
    held: list[HeldModel]
    on_host: int


class GroupStatus(msgspec.Struct, frozen=True):
    """The state of the workers on some devices.

    Attributes:
        state: `starting`, `ready`, `running` or `failed`.
        model: the model that the workers compute with.
    """

    state: str
    model: str
    ranks: list[RankStatus]


class Failure(msgspec.Struct, frozen=True):
    """A worker's failure: its message to the user, and its time (seconds since the epoch)."""

    text: str
    at: float


class BackendStatus(msgspec.Struct, frozen=True):
    """The state of all workers.

    Attributes:
        runs: number of finished runs.
        failure: the failure of the last run, if it failed.
    """

    groups: list[GroupStatus]
    runs: int
    failure: Failure | None


def rank_statuses(
    devices: Sequence[str], heard: Mapping[int, Heard], latest: Mapping[int, RankCostReply]
) -> list[RankStatus]:
    """Return the state of a group's ranks by their last heartbeats and reports."""
    return [_rank_status(rank, device, heard.get(rank), latest.get(rank)) for rank, device in enumerate(devices)]


def starting(devices: Sequence[str]) -> GroupStatus:
    """Return the state of a group that has not started yet."""
    return GroupStatus("starting", "", rank_statuses(devices, {}, {}))


def model_name(model: ModelSpec) -> str:
    """Return a model's name for people, which is the name of its file."""
    return Path(model.path).name


def _rank_status(rank: int, device: str, heard: Heard | None, report: RankCostReply | None) -> RankStatus:
    heartbeat = heard.heartbeat if heard else None
    return RankStatus(
        rank=rank,
        device=device,
        phase=heartbeat.phase if heartbeat else "starting",
        step=heartbeat.step if heartbeat else 0,
        waiting=heartbeat.waiting if heartbeat else False,
        held=[HeldModel(model_name(entry.model), entry.nbytes) for entry in report.models_on_device] if report else [],
        on_host=report.on_host if report else 0,
    )

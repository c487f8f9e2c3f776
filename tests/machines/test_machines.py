"""One denoise on two machines: as exact as on one, over one port, and closed to strangers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from parallel_backend.errors import Refused, RequestFailed, WorkerFailed
from parallel_backend.host import Backend
from parallel_backend.plan import ModelLimits, ParallelPlan, ResolvedPlan, Workload, resolve
from parallel_backend.wire.frames import MAGIC, encode
from parallel_backend.wire.handshake import ANSWER, CLIENT, GREETING, LOST_SECONDS, RESULT, VARIABLE, HandshakeVerdict
from parallel_backend.wire.message import PROTOCOL
from parallel_backend.wire.to_worker import JoinRequest
from tests.engine.conftest import TOLERANCE, Job, Runner, sigmas
from tests.machines.conftest import wait_for
from tests.machines.network import Machines
from tests.support.latents import relative_error
from tests.support.pipefusion_simulation import simulate
from tests.support.selection import thorough
from tests.support.tiny.flux import save_flux

pytestmark = thorough
"""The quick run tests the listener in tests/wire/test_gateway.py."""

STEPS = 2
BLOCKS = 4
GUIDANCE = 4.0
LOST = r"^Worker [23] of 4 \({0.address}/{0.names[1]}/cpu\) was lost while sampling, step \d+"
"""The error when a worker of machine b is lost, with the machines' addresses and names to fill in."""


@pytest.fixture(scope="module")
def group(machines: Machines) -> Iterator[Machines]:
    """Start workers on both machines, two on each."""
    machines.start()
    wait_for(machines)
    yield machines
    machines.stop()


@pytest.fixture
def run() -> Iterator[Runner]:
    """Provide a separate client for each test."""
    runner = Runner(Backend())
    yield runner
    runner.close()


def job_of(machines: Machines, steps: int = STEPS, **size: int) -> Job:
    path = machines.folder / "tiny-dev.safetensors"
    return Job(path, sigmas(steps), cfg=1.0, text=(77, 1), guidance=GUIDANCE, **size)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def small(machines: Machines) -> Job:
    """Provide a job of a small picture."""
    return job_of(machines, height=17, width=13)


@pytest.fixture(scope="module")
def endless(machines: Machines) -> Job:
    """Provide a job with more steps than any test waits for."""
    return job_of(machines, 3000, height=17, width=13)


@functools.cache
def reference(job: Job) -> Tensor:
    """Return the latent by ComfyUI's own model and sampler in this process."""
    return simulate(
        load_file(job.path),
        noise=job.noise,
        sigmas=job.sigmas,
        positive=job.prompts[0],
        guidance=GUIDANCE,
        patches=1,
        warmup_steps=STEPS,
    )


def planned(machines: Machines, **requested_plan: int) -> ResolvedPlan:
    """Return the plan for the group, as the nodes resolve it."""
    plan = ParallelPlan(devices=str(machines.address), warmup_steps=STEPS, **requested_plan)  # type: ignore[arg-type]
    return resolve(Backend().placed_on_devices(plan), 0, ModelLimits(2, 128, BLOCKS), Workload(1, False, 64))


@pytest.fixture
def plan(group: Machines) -> ResolvedPlan:
    wait_for(group)
    return planned(group, pipefusion=2, ulysses=2)


def assert_right(run: Runner, job: Job, plan: ResolvedPlan) -> None:
    assert relative_error(run(job, plan), reference(job)) <= TOLERANCE


def test_two_machines_give_comfyuis_result(group: Machines, run: Runner) -> None:
    """The job has 4096 image tokens, as many as 1024x1024 pixels have."""
    job = job_of(group, height=128, width=128)
    first, second = (f"{group.address}/{name}/cpu" for name in group.names)
    for requested_plan in ({"pipefusion": 4}, {"pipefusion": 2, "ulysses": 2}):
        plan = planned(group, **requested_plan)
        assert plan.devices == (first, first, second, second)
        assert_right(run, job, plan)


# -- strangers


def test_a_client_with_another_secret_is_refused(
    group: Machines, plan: ResolvedPlan, run: Runner, small: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("not the secret of this group")
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(Refused, match=f"{group.address} refused the connection: the secrets differ: use the same"):
        run(small, plan)


def connect(machines: Machines) -> socket.socket:
    return socket.create_connection((machines.address.host, machines.address.port), timeout=15)


def drained(connection: socket.socket) -> bytes:
    """Return all bytes until the other side closes the connection; a reset counts as a close."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            data += piece
    return data


def test_an_old_protocol_is_refused(group: Machines) -> None:
    with connect(group) as connection:
        connection.recv(GREETING.size, socket.MSG_WAITALL)
        connection.sendall(ANSWER.pack(MAGIC, PROTOCOL - 1, CLIENT, bytes(32), bytes(32)))
        verdict, _, proof = RESULT.unpack(drained(connection))
        assert verdict == HandshakeVerdict.WRONG_PROTOCOL
        assert proof == bytes(32)


def test_frames_before_the_handshake_are_not_read(group: Machines) -> None:
    with connect(group) as connection:
        connection.sendall(encode(JoinRequest(1)) * 5)
        answer = drained(connection)[GREETING.size :]
        assert answer in (b"", RESULT.pack(HandshakeVerdict.WRONG_SECRET, 0, bytes(32)))


def test_a_second_client_is_refused_with_the_address_of_the_first(
    group: Machines, plan: ResolvedPlan, run: Runner, small: Job
) -> None:
    assert_right(run, small, plan)
    second = Runner(Backend())
    with pytest.raises(Refused, match=rf"these workers are serving another client \({group.here}:\d+\): wait until"):
        second(small, plan)
    second.close()
    assert_right(run, small, plan)


# -- failures


def test_a_file_that_a_machine_lacks_is_named_with_the_machine(
    group: Machines, plan: ResolvedPlan, run: Runner, small: Job, tmp_path: Path
) -> None:
    other = save_flux(
        tmp_path / "only-here.safetensors", heads=2, double_blocks=1, single_blocks=3, guidance=True, seed=9
    )
    with pytest.raises(
        Refused, match=rf"^Worker 0 of 4: only-here\.safetensors is not on {group.names[0]}: copy ComfyUI's file"
    ):
        run(dataclasses.replace(small, path=other), plan)
    (group.models[0] / other.name).write_bytes(other.read_bytes())
    wrong = group.models[1] / other.name
    wrong.write_bytes(b"another file of this name")
    message = rf"^Worker 2 of 4: {other.name} is not on {group.names[1]} \({wrong} has the same name and other contents\): copy"
    with pytest.raises(Refused, match=message):
        run(dataclasses.replace(small, path=other), plan)
    assert_right(run, small, plan)


def test_data_that_raises_on_all_machines_fails_only_its_request(group: Machines, run: Runner, small: Job) -> None:
    wait_for(group)
    plan = planned(group, ring=2, ulysses=2)
    with pytest.raises(RequestFailed, match=r"^All 4 workers raised the same error while sampling"):
        run(small, plan, replaced={"prompt.positive.0.context": torch.zeros(1, 77, 63)})
    assert_right(run, small, plan)


def test_a_killed_client_leaves_the_group_to_the_next_client(plan: ResolvedPlan, small: Job, endless: Job) -> None:
    """The client is killed in the middle of a denoise."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            Runner(Backend())(endless, plan, on_step=lambda: os.write(write, b"."))
        os._exit(1)
    assert os.read(read, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    next_one = Runner(Backend())
    assert_right(next_one, small, plan)
    next_one.close()


def test_a_killed_worker_is_named_and_torchrun_restarts_the_group(
    group: Machines, plan: ResolvedPlan, run: Runner, small: Job, endless: Job
) -> None:
    seconds = disturbed(
        run,
        endless,
        plan,
        lambda: group.kill(3),
        rf"^Worker 3 of 4 \({group.address}/{group.names[1]}/cpu\) was lost while",
    )
    assert seconds <= 5
    wait_for(group)
    assert_right(run, small, plan)


def test_a_pulled_cable_gives_one_error_within_the_bound(
    group: Machines, plan: ResolvedPlan, run: Runner, small: Job, endless: Job
) -> None:
    if not group.apart:
        pytest.skip("the loopback interface has no cable: network namespaces are not permitted here")
    try:
        seconds = disturbed(run, endless, plan, lambda: group.cable(False), LOST.format(group))
    finally:
        group.cable(True)
    assert LOST_SECONDS / 2 <= seconds <= LOST_SECONDS + 10
    wait_for(group)
    assert_right(run, small, plan)


def disturbed(run: Runner, job: Job, plan: ResolvedPlan, disturb: Callable[[], None], message: str) -> float:
    """Disturb the workers at a denoise's third step, and return the seconds from then to the error."""
    happened: list[float] = []
    steps = itertools.count()

    def on_step() -> None:
        if next(steps) == 3:
            disturb()
            happened.append(time.monotonic())

    with pytest.raises(WorkerFailed) as failure:
        run(job, plan, on_step=on_step)
    assert re.search(message, str(failure.value))
    return time.monotonic() - happened[0]


# -- versions


def test_a_lost_machine_that_returns_with_another_diffusers_is_named_to_models_that_need_it(
    group: Machines, plan: ResolvedPlan, run: Runner, small: Job, endless: Job
) -> None:
    oldest = os.environ["OLDEST_DIFFUSERS"]
    (package,) = importlib.metadata.distributions(name="diffusers", path=[oldest])
    assert disturbed(run, endless, plan, lambda: group.lose_machine(1), LOST.format(group)) <= 5
    group.start_machine(1, oldest)
    wait_for(group)
    assert_right(run, small, plan)  # FLUX needs no diffusers
    first, second = group.names
    message = rf"^worker 2 on {second} has diffusers {package.version} and worker 0 on {first} 0\.42\.\d: install"
    with pytest.raises(Refused, match=message):
        run.forward("cogvideox", small.path, [{}], plan)
    assert_right(run, small, plan)

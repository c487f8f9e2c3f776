"""Loading in real workers: bytes read, memory and address space taken, and ends in the middle of it."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from parallel_backend.errors import Cancelled, WorkerFailed
from parallel_backend.host import Backend
from parallel_backend.models.flux import FluxFamily
from parallel_backend.plan import ResolvedPlan
from parallel_backend.weights.checkpoint import read_header
from scripts.comfyui import REPO
from tests.engine.conftest import TOLERANCE, Job, Runner, relative_error, sigmas
from tests.plans import cpu_plan
from tests.tiny_flux import flux_tensors, save_flux

MEBIBYTE = 1 << 20
GIBIBYTE = 1 << 30
SLACK = 300 * MEBIBYTE
"""What a worker may take while loading above its weights and what it has when idle."""

BLOCKS = 4
PLANS = {
    "replicated 2": cpu_plan(ulysses=2, blocks=BLOCKS),
    "pipefusion 2": cpu_plan(pipefusion=2, blocks=BLOCKS),
    "sharded 2": cpu_plan(ulysses=2, weights="sharded", blocks=BLOCKS),
    "pipefusion 4": cpu_plan(pipefusion=4, blocks=BLOCKS),
}

IN_FULL_SHM = """
import sys
from pathlib import Path
from parallel_backend.host import Backend
from tests.engine.conftest import Job, Runner, sigmas
from tests.plans import cpu_plan

with open("/dev/shm/full", "wb") as file:
    try:
        file.write(bytes(1 << 20))
    except OSError as error:
        assert "No space" in str(error)
run = Runner(Backend())
for plan in (cpu_plan(ulysses=2, blocks=4), cpu_plan(pipefusion=2, blocks=4)):
    assert run(Job(Path(sys.argv[1]), sigmas(2)), plan).isfinite().all()
run.close()
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FLUX of 363 MiB in 4 blocks."""
    return save_flux(tmp_path_factory.mktemp("big") / "big.safetensors", heads=8, single_blocks=BLOCKS - 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_flux(tmp_path_factory.mktemp("tiny") / "tiny.safetensors", heads=2, single_blocks=BLOCKS - 1)


@pytest.fixture
def fresh() -> Iterator[Runner]:
    """Workers of this test alone."""
    runner = Runner(Backend())
    yield runner
    runner.close()


def padded(path: Path, tensors: dict[str, torch.Tensor], size: int) -> Path:
    """A file of tensors and one more, unused, that makes it `size` bytes larger; it takes no room on disk."""
    data = save(tensors)
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header["padding"] = {"dtype": "U8", "shape": [size], "data_offsets": [len(body), len(body) + size]}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw + body)
        file.truncate(file.tell() + size)
    return path


def status(pid: int, field: str) -> int:
    """A field of /proc/PID/status, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def read_by(pid: int) -> int:
    """Bytes that a process has asked its files for."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_byte_is_read_once_and_memory_stays_small(
    fresh: Runner, tiny: Path, big: Path, plan: ResolvedPlan
) -> None:
    fresh(Job(tiny, sigmas(2)), plan)
    workers = fresh.workers()
    idle = [status(pid, "VmRSS") for pid in workers]
    before = [read_by(pid) for pid in workers]
    peaks: list[int] = []

    def on_loading(done: int, total: int) -> None:
        if done == total:  # before sampling, for which shards are gathered
            peaks.extend(status(pid, "VmHWM") for pid in workers)

    fresh(Job(big, sigmas(2)), plan, on_loading=on_loading)
    reports = sorted(fresh.answer.reports, key=lambda report: report.rank)
    part, _ = FluxFamily().inspect(read_header(big))
    whole = sum(entry.nbytes for entry in part.entries.values())
    counted = [report.read for report in reports]
    by_kernel = [read_by(pid) - start for pid, start in zip(workers, before, strict=True)]
    above = [peak - start - report.weights for peak, start, report in zip(peaks, idle, reports, strict=True)]
    print(
        f"\n{plan.degrees} {plan.weights}: file {whole / MEBIBYTE:.1f} MiB; MiB by rank: counted "
        + "; ".join(
            f"{name} {[round(n / MEBIBYTE, 1) for n in numbers]}"
            for name, numbers in (
                ("read", counted),
                ("by the kernel", by_kernel),
                ("weights", [report.weights for report in reports]),
                ("peak above idle and weights", above),
            )
        )
    )
    assert sum(counted) == whole
    assert max(above) <= SLACK
    assert all(0 <= kernel - count < MEBIBYTE for kernel, count in zip(by_kernel, counted, strict=True))


@pytest.mark.parametrize("name", ["replicated 2", "pipefusion 2"])
def test_a_file_larger_than_the_address_space_loads(fresh: Runner, tmp_path: Path, tiny: Path, name: str) -> None:
    plan, tensors = PLANS[name], flux_tensors(heads=2, single_blocks=BLOCKS - 1)
    file = padded(tmp_path / "padded.safetensors", tensors, GIBIBYTE)
    half = file.stat().st_size // 2
    expected = fresh(Job(tiny, sigmas(2)), plan)
    for pid in fresh.workers():
        limit = status(pid, "VmSize") + half
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    assert torch.equal(fresh(Job(file, sigmas(2)), plan), expected)
    script = (
        "import resource, sys, torch; from pathlib import Path; from safetensors.torch import load_file\n"
        "size = 1024 * int(Path('/proc/self/status').read_text().split('VmSize:')[1].split()[0])\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (size + {half},) * 2)\n"
        "load_file(sys.argv[1])"
    )
    failed = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=False)
    assert failed.returncode != 0
    assert "memory" in failed.stderr.lower()


def in_the_middle(do: Callable[[], None]) -> tuple[Callable[[int, int], None], list[tuple[int, int]]]:
    """A listener that does something when loading has begun, and what it was told."""
    told: list[tuple[int, int]] = []

    def on_loading(done: int, total: int) -> None:
        if not told:
            do()
        told.append((done, total))

    return on_loading, told


def test_cancel_while_loading(fresh: Runner, big: Path, tiny: Path) -> None:
    plan, cancelled = PLANS["replicated 2"], []
    expected = fresh(Job(tiny, sigmas(2)), plan)
    workers = fresh.workers()
    on_loading, told = in_the_middle(lambda: cancelled.append(True))
    with pytest.raises(Cancelled):
        fresh(Job(big, sigmas(2)), plan, on_loading=on_loading, interrupted=lambda: bool(cancelled))
    assert 0 < told[0][0] < told[0][1]
    assert told[-1][0] < told[-1][1]
    assert torch.equal(fresh(Job(tiny, sigmas(2)), plan), expected)
    assert fresh.workers() == workers
    assert fresh(Job(big, sigmas(2)), plan).isfinite().all()
    assert sum(report.read for report in fresh.answer.reports) > 0


def test_a_file_that_shrinks_while_it_is_loaded(fresh: Runner, tmp_path: Path, big: Path, tiny: Path) -> None:
    plan, file = PLANS["pipefusion 2"], tmp_path / "shrinks.safetensors"
    file.write_bytes(big.read_bytes())
    expected = fresh(Job(tiny, sigmas(2)), plan)
    workers = fresh.workers()
    on_loading, told = in_the_middle(lambda: os.truncate(file, 1 << 20))
    with pytest.raises(WorkerFailed, match=r"shrinks.safetensors ended at byte \d+ while it was being read") as failure:
        fresh(Job(file, sigmas(2)), plan, on_loading=on_loading)
    assert told
    assert "Traceback" not in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert relative_error(fresh(Job(tiny, sigmas(2)), plan), expected) <= TOLERANCE


def test_a_full_shared_memory_is_not_in_the_way(tiny: Path) -> None:
    """In a mount namespace whose /dev/shm has 64 KiB, all of them taken."""
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    if subprocess.run([*namespace, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a mount namespace")
    run = [*namespace, "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", IN_FULL_SHM, str(tiny)]
    done = subprocess.run(run, cwd=REPO, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr

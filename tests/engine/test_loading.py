"""Loading in real workers: bytes read, memory and address space used, and interruptions while loading."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save

from parallel_backend.errors import Cancelled, NotFinite, Refused, WorkerFailed
from parallel_backend.plan import ResolvedPlan
from parallel_backend.weights.files.checkpoint import read_header
from scripts.comfyui import REPO
from tests.engine.conftest import TOLERANCE, Job, Runner, relative_error, sigmas
from tests.support.loading_costs import field, loading_costs
from tests.support.plans import cpu_plan
from tests.support.selection import thorough
from tests.support.tiny.flux import flux_tensors, save_flux
from tests.support.tiny.formats import save_gguf, save_scaled

MEBIBYTE = 1 << 20
GIBIBYTE = 1 << 30
SLACK = 300 * MEBIBYTE
"""Bytes that a worker may use while loading, above its weights and its idle memory."""

READ_AHEAD = 8 * MEBIBYTE
"""Bytes that the kernel may read from the disk beyond those asked for: the rest of pages, and pages of the workers'
own code.
"""

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
from tests.support.plans import cpu_plan

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
    """Return a FLUX file of 363 MiB in 4 blocks."""
    return save_flux(tmp_path_factory.mktemp("big") / "big.safetensors", heads=8, single_blocks=BLOCKS - 1)


def short(path: Path) -> Job:
    """Return a job of one step with few tokens, for a wide model."""
    return Job(path, sigmas(1), height=4, width=4, text=(5, 5))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_flux(tmp_path_factory.mktemp("tiny") / "tiny.safetensors", heads=2, single_blocks=BLOCKS - 1)


@pytest.fixture
def fresh(run: Runner) -> Iterator[Runner]:
    """Provide workers for this test only."""
    run.end_workers()
    yield run
    run.end_workers()


def padded(path: Path, tensors: dict[str, torch.Tensor], size: int) -> Path:
    """Write the tensors and an unused one that makes the file `size` bytes larger. The padding takes no space on disk."""
    data = save(tensors)
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header["padding"] = {"dtype": "U8", "shape": [size], "data_offsets": [len(body), len(body) + size]}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw + body)
        file.truncate(file.tell() + size)
    return path


@pytest.mark.parametrize(
    "plan",
    [  # weights/test_sharded and weights/test_checkpoint have what each rank reads of a file
        pytest.param(plan, id=name, marks=[thorough] * (name != "sharded 2")) for name, plan in PLANS.items()
    ],
)
def test_every_byte_is_read_once_and_memory_stays_small(
    fresh: Runner, tiny: Path, big: Path, plan: ResolvedPlan
) -> None:
    costs = loading_costs(fresh, tiny, big, plan)
    print("\n", *costs, sep="\n")
    total = sum(entry.nbytes for entry in read_header(big).entries.values())
    assert sum(cost.counted for cost in costs) == total
    assert sum(cost.disk for cost in costs) <= total + READ_AHEAD, "what ranks read again is in the page cache"
    assert all(cost.asked >= cost.counted for cost in costs)
    assert all(cost.asked - cost.weights < MEBIBYTE for cost in costs), "a rank reads no more than it holds"
    assert max(cost.above - cost.weights for cost in costs) <= SLACK


@pytest.fixture(scope="module")
def gigabyte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of the tiny FLUX with 1 GiB of padding."""
    tensors = flux_tensors(heads=2, single_blocks=BLOCKS - 1)
    return padded(tmp_path_factory.mktemp("gigabyte") / "padded.safetensors", tensors, GIBIBYTE)


@thorough  # shows the limit of the next test
def test_load_file_needs_address_space_for_the_whole_file(gigabyte: Path) -> None:
    script = (
        "import resource, sys, torch; from pathlib import Path; from safetensors.torch import load_file\n"
        "size = 1024 * int(Path('/proc/self/status').read_text().split('VmSize:')[1].split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[2]),) * 2)\n"
        "load_file(sys.argv[1])"
    )
    half = gigabyte.stat().st_size // 2
    failed = subprocess.run(
        [sys.executable, "-c", script, str(gigabyte), str(half)], capture_output=True, text=True, check=False
    )
    assert failed.returncode != 0
    assert "memory" in failed.stderr.lower()


@pytest.mark.parametrize("name", ["replicated 2", pytest.param("pipefusion 2", marks=thorough)])
def test_a_file_larger_than_the_address_space_loads(fresh: Runner, gigabyte: Path, tiny: Path, name: str) -> None:
    """The limit is the one under which load_file fails."""
    plan = PLANS[name]
    expected = fresh(Job(tiny, sigmas(2)), plan)
    for pid in fresh.workers():
        limit = field(pid, "status", "VmSize") + gigabyte.stat().st_size // 2
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    assert torch.equal(fresh(Job(gigabyte, sigmas(2)), plan), expected)


def in_the_middle(do: Callable[[], None]) -> tuple[Callable[[int, int], None], list[tuple[int, int]]]:
    """Return a listener that calls `do` when loading has begun, and the list of progress that the listener received."""
    told: list[tuple[int, int]] = []

    def on_loading(done: int, total: int) -> None:
        if not told:
            do()
        told.append((done, total))

    return on_loading, told


def test_cancel_while_loading_keeps_the_workers_and_the_loaded_model(fresh: Runner, big: Path, tiny: Path) -> None:
    plan, cancelled = PLANS["replicated 2"], []
    expected = fresh(Job(tiny, sigmas(2)), plan)
    workers = fresh.workers()
    on_loading, told = in_the_middle(lambda: cancelled.append(True))
    with pytest.raises(Cancelled):
        fresh(short(big), plan, on_loading=on_loading, is_cancelled=lambda: bool(cancelled))
    assert 0 < told[0][0] < told[0][1]
    assert told[-1][0] < told[-1][1]
    assert torch.equal(fresh(Job(tiny, sigmas(2)), plan), expected)
    assert fresh.workers() == workers
    assert fresh(short(big), plan).isfinite().all()
    assert sum(report.read for report in fresh.answer.reports) > 0


def test_a_file_that_shrinks_while_loading_gives_one_error_and_the_next_run_works(
    fresh: Runner, tmp_path: Path, big: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plan, file = PLANS["pipefusion 2"], tmp_path / "shrinks.safetensors"
    file.write_bytes(big.read_bytes())
    expected = fresh(Job(tiny, sigmas(2)), plan)
    workers = fresh.workers()
    on_loading, told = in_the_middle(lambda: os.truncate(file, 1 << 20))
    with pytest.raises(
        (Refused, WorkerFailed), match=r"shrinks.safetensors ended at byte \d+ while it was being read"
    ) as failure:
        fresh(short(file), plan, on_loading=on_loading)
    assert told
    assert "Traceback" not in str(failure.value)
    assert "\n" not in str(failure.value)
    go_on = isinstance(failure.value, Refused)  # true if every rank found the end at the same point
    assert {Path(f"/proc/{pid}").exists() for pid in workers} == {go_on}
    assert len(list(tmp_path.glob("comfyui-parallel-*"))) == int(go_on), "the workers' folder with socket and logs"
    assert relative_error(fresh(Job(tiny, sigmas(2)), plan), expected) <= TOLERANCE


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, shape = tmp_path_factory.mktemp("formats"), {"heads": 2, "single_blocks": BLOCKS - 1}
    return {
        "plain": save_flux(folder / "plain.safetensors", **shape),
        "scaled fp8": save_scaled(folder / "scaled.safetensors", "metadata", **shape),
        "GGUF": save_gguf(folder / "blocks.gguf", folder / "values.safetensors", Type.Q4_0, **shape),
    }


def with_flips(source: Path, path: Path, count: int, seed: int) -> Path:
    """Write a copy of a file with bits flipped anywhere in its tensors."""
    data = bytearray(source.read_bytes())
    body = min(entry.offset for entry in read_header(source).entries.values())
    generator = random.Random(seed)
    for _ in range(count):
        data[generator.randrange(body, len(data))] ^= 1 << generator.randrange(8)
    path.write_bytes(data)
    return path


# faults/test_numbers has the message for a result that is not finite, and weights/test_formats damaged headers.
@thorough
@pytest.mark.parametrize("kind", ["plain", "scaled fp8", "GGUF"])
def test_bits_flipped_in_a_file_give_a_result_or_one_error_about_the_file(
    run: Runner, formats: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """No format has checksums. The result is that of the model in the damaged file, or one sentence if it is not finite."""
    plan, source = PLANS["pipefusion 2"], formats[kind]
    expected = run(Job(source, sigmas(2)), plan)
    workers, refused, messages = run.workers(), [], []
    for seed, count in enumerate((1, 1, 1, 30, 30, 3000, 3000)):
        flipped = Job(with_flips(source, tmp_path / f"{seed}{source.suffix}", count, seed), sigmas(2))
        try:
            assert run(flipped, plan).isfinite().all()
        except NotFinite as error:
            messages.append(str(error))
            refused.append(count)
    sentence = r"[^\n.]+: likely the model's file is damaged \(download it again\)[^\n.]+\."
    assert all(re.fullmatch(sentence, message) for message in messages), messages
    assert refused, "none of them was so damaged"
    assert 1 not in refused, "each of them was so damaged"
    assert torch.equal(run(Job(source, sigmas(2)), plan), expected)
    assert run.workers() == workers


@thorough  # the test imports torch again
def test_loading_works_with_a_full_shared_memory(tiny: Path) -> None:
    """The test runs in a mount namespace whose /dev/shm has 64 KiB, all of them in use."""
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    if subprocess.run([*namespace, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a mount namespace")
    run = [*namespace, "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", IN_FULL_SHM, str(tiny)]
    done = subprocess.run(run, cwd=REPO, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr

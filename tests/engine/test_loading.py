"""Loading in real workers: bytes read, memory and address space used, and interruptions while loading."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import struct
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
from tests.engine.conftest import TOLERANCE, Job, Runner, sigmas
from tests.support.latents import relative_error
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


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a FLUX file of 363 MiB in 4 blocks."""
    return save_flux(tmp_path_factory.mktemp("big") / "big.safetensors", heads=8, single_blocks=BLOCKS - 1)


def short(path: Path) -> Job:
    """Return a job of one step with few tokens, for a wide model."""
    return Job(path, sigmas(1), height=4, width=4, text=(5, 5))


@pytest.fixture(scope="session")
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


@pytest.mark.parametrize("name", ["replicated 2", pytest.param("pipefusion 2", marks=thorough)])
def test_a_file_larger_than_the_address_space_loads(fresh: Runner, gigabyte: Path, tiny: Path, name: str) -> None:
    """The limit leaves no room to map the file, as safetensors' own load_file does."""
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
@pytest.mark.parametrize(
    "save",
    [
        lambda folder, **shape: save_flux(folder / "plain.safetensors", **shape),
        lambda folder, **shape: save_scaled(folder / "scaled.safetensors", "metadata", **shape),
        lambda folder, **shape: save_gguf(folder / "blocks.gguf", folder / "values", Type.Q4_0, **shape),
    ],
    ids=["plain", "scaled fp8", "GGUF"],
)
def test_bits_flipped_in_a_file_give_a_result_or_one_error_about_the_file(
    run: Runner, tmp_path: Path, save: Callable[..., Path]
) -> None:
    """No format has checksums. The result is that of the model in the damaged file, or one sentence if it is not finite."""
    plan, source = PLANS["pipefusion 2"], save(tmp_path, heads=2, single_blocks=BLOCKS - 1)
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

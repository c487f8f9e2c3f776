"""The checks for machines with GPUs, run on the CPU, so that they do not fail at their first line on a rented card."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import time
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from parallel_backend.comfyui_folder import FOLDER
from parallel_backend.plan.calibrate import main
from parallel_backend.plan.gpu_report import lines_of
from parallel_backend.plan.predict.cards import read_cards
from parallel_backend.weights.formats import BLOCK_TYPES
from parallel_backend.weights.loading.rounds import Way
from scripts.gpu_check.__main__ import LISTS
from scripts.gpu_check.connections import transports
from scripts.gpu_check.prompts import missing
from scripts.gpu_check.report import Report
from scripts.gpu_check.stand_ins import STAND_INS, write_stand_ins
from scripts.gpu_check.visit import (
    ENDING,
    ENTRIES,
    INSTALLATION,
    LIMIT,
    LINES,
    MISSING,
    ONE_CARD,
    ONE_CARD_AGAIN,
    SEVERAL_CARDS,
    command_of,
    run,
    seconds_for,
)
from scripts.gpu_kernels import FATBIN, only_hopper
from scripts.tested import comfyui_name, row_of_report
from tests.support.selection import thorough

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"^\[\d\] (PASS|FAIL|INFO) ([^:]+):", re.MULTILINE)
SMALL = "FLUX.1, small"
PASSED = {
    "ready": {"the packages that ComfyUI requires", "modules that the checks import"},
    "one": {
        *(
            f"kernel sdpa torch.{kind}"
            for kind in ("bfloat16 128", "float16 64", "bfloat16 72", "bfloat16 512", "float32 128")
        ),
        f"streamed weights, {SMALL}",
        f"{SMALL} in fp32, the result",
        f"{SMALL}, eager, the result",
    },
    "compiled": {
        f"{SMALL}, compiled by aot_eager, the result",
        f"{SMALL}, compiled by aot_eager, all blocks",
    },
    "whole": set(),
    "formats": {
        *(f"GGUF {kind.name}" for kind in BLOCK_TYPES),
        *(f"a layer, {name}" for name in ("fp8 fast", "scaled fp8", "NVFP4", "MXFP8", "INT8")),
    },
    "races": {"all of sixteen blocks, twice", "streamed, sixteen blocks, with room", "streamed, sixteen blocks"},
    "shares": set(),
    "prompts": {
        *(f"a sprite, {ranks} workers" for ranks in (1, 2)),
        *(f"{name}, {weights}" for name in ("a sprite", "a Wan video") for weights in ("bf16", "fp8 weights")),
        *("a LoRA", "without the LoRA again", "a parallel VAE", "Unload", "Cancel", "kill -9", "out of memory"),
        *(f"after {fault}" for fault in ("Unload", "Cancel", "kill -9", "out of memory")),
        "nothing is left behind",
    },
    "connections": {
        "uneven and empty splits",
        "a hop of a ring",
        "gathers into memory that is allocated each time",
        "communicators opened repeatedly",
        "from rank 0 to rank 1",
        "from rank 1 to rank 0",
    },
    "many": {
        "ulysses 2",
        "ring 2",
        "prompts of two lengths, cfg 2",
        "prompts of two lengths, data 2",
        "sharded weights, ulysses 2",
        "sharded, sixteen blocks",
        *(f"loading, {way.value}" for way in Way),
    },
    "pipeline": {"pipefusion 2, 4 patches"},
}
"""Checks that a CPU can pass: results equal ComfyUI's, or one rank's, to 1e-5 or to the last bit."""

TOLD = {
    "ready": {"the card", "comfy-kitchen"},
    "one": {
        "memory, 4 patches",
        "memory pinned twice",
        "the GPU is busy",
        "no synchronisation in the loop",
        f"{SMALL}, eager, a step against ComfyUI's",
    },
    "many": {"equal noise on all ranks", "cancel flag, ring 2", "a hop overlaps with attention"},
    "compiled": {f"{SMALL}, compiled by aot_eager, a step against ComfyUI's", "FLUX.1-dev, compiled by aot_eager"},
    "formats": {"GGUF's kernels"},
    "whole": {"streamed weights, FLUX.1-dev"},
    "shares": {
        "rates for plans",
        *(f"{SMALL}, a rank's share, {plan}" for plan in ("1 worker", "ulysses 2", "ring 2")),
        f"{SMALL}, a step against ComfyUI's forward",
    },
    "connections": {"NCCL's transports"},
    "pipeline": {
        "no hang while kernels are loaded",
        "no hang while kernels for matrices are loaded",
        "PipeFusion's hops overlap with computing",
    },
}
"""Some of the checks that only a GPU can pass or fail."""


REHEARSED = ("prompts", "formats")
"""Lists that run in a rehearsal of a visit; the others run alone."""

BROUGHT_ALONG = "simpleeval"
"""A package of one file that ComfyUI requires: the visit brings it along as a wheel."""


@thorough
@pytest.mark.parametrize("checks", sorted(PASSED.keys() - {"ready", *REHEARSED}))
def test_the_checks_for_gpus_pass_on_the_cpu(checks: str) -> None:
    environment = os.environ | {FOLDER: os.environ["COMFYUI_PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command_of(checks, 0, "cpu"), cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    passes(checks, done.stdout)


def passes(checks: str, output: str) -> None:
    """Assert that a list's output has the lines that a CPU can answer, and no failure."""
    found = set(LINE.findall(output))
    assert not [name for verdict, name in found if verdict == "FAIL"], output
    assert {name for verdict, name in found if verdict == "PASS"} == PASSED[checks]
    assert TOLD.get(checks, set()) <= {name for verdict, name in found if verdict == "INFO"}


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that gpu_prepare.sh makes, here without a network: one wheel, ComfyUI and this pack as it is."""
    gpu = tmp_path_factory.mktemp("visit") / ".gpu"
    (gpu / "wheels").mkdir(parents=True)
    package = metadata.distribution(BROUGHT_ALONG)
    with zipfile.ZipFile(gpu / "wheels" / f"{BROUGHT_ALONG}-{package.version}-py3-none-any.whl", "w") as wheel:
        for part in package.files or ():
            if part.parts[0] not in ("..", "__pycache__"):
                wheel.write(str(package.locate_file(part)), str(part))
    shutil.copy(ROOT / "scripts" / "gpu_on_card.sh", gpu)
    pack = "git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | xz -0"
    comfyui = (
        "tar -c --exclude='./models/?*' --exclude='./custom_nodes/?*' --exclude='./.*' --exclude='*.json' . | xz -0"
    )
    for name, folder, command in (("pack", ROOT, pack), ("comfyui", os.environ["COMFYUI_PATH"], comfyui)):
        with (gpu / f"{name}.tar.xz").open("wb") as file:
            subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=folder, stdout=file, check=True)
    return gpu


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a card's machine, with links to this one's packages.

    It lacks the packages of the stand-ins, of the tests, and the one that the visit brings along.
    """
    lacking = (*STAND_INS, "pytest", "hypothesis", "playwright", BROUGHT_ALONG)
    folder = tmp_path_factory.mktemp("machine")
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    for found in metadata.distributions():
        if not found.name.lower().replace("_", "-").startswith(lacking):
            for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                if not top.endswith(".pth") and not (packages / top).exists():
                    (packages / top).symlink_to(Path(str(found.locate_file(top))))
    return folder / "bin" / "python"


def visit(gpu: Path, python: Path, out: Path, *lists: str) -> subprocess.CompletedProcess[str]:
    """Run gpu_on_card.sh with an empty home and without the variables of a developer's machine."""
    home = out.with_name(f"{out.name}-home")
    home.mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHON": str(python),
        "OUT": str(out),
        "WITHOUT_CARD": "1",
        "LIMIT": "1200",
        "OMP_NUM_THREADS": "1",
        "PARALLEL_COMFYUI_ARGUMENTS": "[]",
    }
    command = ["bash", str(gpu / "gpu_on_card.sh"), *lists]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=1200)
    assert list(home.iterdir()) == []
    return done


@thorough
def test_a_visit_runs_its_lists_and_leaves_few_files(carried: Path, machine: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = visit(carried, machine, out, *REHEARSED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {file.name for file in out.iterdir()} == {
        "output.txt",
        "summary.txt",
        "lines.jsonl",
        "machine.txt",
        "report.tar.gz",
    }
    summary = (out / "summary.txt").read_text()
    for name in REHEARSED:
        passes(
            name, "\n".join(line.removeprefix(f"{name}: ") for line in summary.splitlines() if line.startswith(name))
        )
    lines = lines_of(out / "lines.jsonl")
    assert {line.checks for line in lines} == set(REHEARSED)
    assert len(lines) == len(summary.splitlines())
    packed = subprocess.run(["tar", "-tzf", out / "report.tar.gz"], capture_output=True, text=True, check=True)
    assert {f"report/{name}.txt" for name in ("ready", *REHEARSED)} <= set(packed.stdout.split())


@thorough
def test_a_visit_ends_at_once_where_a_package_is_missing(carried: Path, machine: Path, tmp_path: Path) -> None:
    poor = tmp_path / ".gpu"
    shutil.copytree(carried, poor)
    for wheel in (poor / "wheels").iterdir():
        wheel.unlink()
    done = visit(poor, machine, tmp_path / "out", *REHEARSED)
    assert done.returncode == MISSING, done.stdout + done.stderr
    assert f"FAIL the packages that ComfyUI requires: {BROUGHT_ALONG} are not installed" in done.stdout
    assert "GGUF" not in done.stdout


def test_a_visit_is_refused_if_nothing_was_prepared(tmp_path: Path) -> None:
    shutil.copy(ROOT / "scripts" / "gpu_on_card.sh", tmp_path)
    command = ["bash", str(tmp_path / "gpu_on_card.sh")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == MISSING
    assert done.stderr.startswith(f"gpu_on_card.sh: {tmp_path} has no ComfyUI: ")


def test_a_list_that_does_not_exist_is_refused_before_anything_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.gpu_check.visit", "--out", str(tmp_path), "prompts", "nope"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "nope: no such list: use any of prompts, one, " in done.stderr


def test_every_list_is_planned_and_has_its_expected_checks() -> None:
    assert ENTRIES.keys() == {*ONE_CARD, *ONE_CARD_AGAIN, *SEVERAL_CARDS}
    assert {name.partition("-")[0] for name in ENTRIES} | {"ready"} == LISTS.keys() | {"doctor"}
    assert LISTS.keys() == PASSED.keys()


def test_scripts_limit_a_visit_to_nine_minutes_and_its_page_has_the_lists_of_one_card_and_their_seconds() -> None:
    assert LIMIT <= 540
    for script in ("gpu.sh", "gpu_on_card.sh"):
        assert f"LIMIT=${{LIMIT:-{LIMIT}}}" in (ROOT / "scripts" / script).read_text()
    page = (ROOT / "docs/develop/first-card.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| .+ \| (\d+) \|$", page, re.MULTILINE)
    assert rows == [(name, str(ENTRIES[name].seconds)) for name in (*ONE_CARD, *ONE_CARD_AGAIN)]


def test_lists_that_hang_leave_the_other_lists_their_time_and_a_short_visit_gives_it_to_the_first() -> None:
    for order in (ONE_CARD, ONE_CARD_AGAIN, SEVERAL_CARDS):
        left: float = LIMIT - INSTALLATION - ENDING
        for place, name in enumerate(order):
            seconds = seconds_for(name, order[place + 1 :], left)
            assert ENTRIES[name].seconds <= seconds <= 2 * ENTRIES[name].seconds
            left -= seconds
        assert left >= 0
    assert seconds_for("prompts", ONE_CARD[1:], 150) == ENTRIES["prompts"].seconds
    assert seconds_for("one", ONE_CARD[2:], 50) == 50


def test_a_list_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    """The list's child process has its own session and keeps the output open, as ranks of torchrun do."""
    child = f"subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
    code = f"import subprocess, time; print({child}.pid, flush=True); time.sleep(60)"
    log, begun = tmp_path / "log.txt", time.monotonic()
    assert run([sys.executable, "-c", code], log, 2, {}) is None
    assert time.monotonic() - begun < 30
    started = int(log.read_text())
    while psutil.pid_exists(started) and psutil.Process(started).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - begun < 40  # the child ends by itself after 60 seconds
        time.sleep(0.1)


def test_a_lists_exit_status_and_variables_are_its_own(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['CUDA_MODULE_LOADING']); sys.exit(7)"
    assert run([sys.executable, "-c", code], tmp_path / "log.txt", 60, {"CUDA_MODULE_LOADING": "EAGER"}) == 7
    assert (tmp_path / "log.txt").read_text() == "EAGER\n"


def test_stand_ins_take_the_place_of_packages_that_are_not_installed(tmp_path: Path) -> None:
    requirements = Path(os.environ["COMFYUI_PATH"], "requirements.txt")
    assert write_stand_ins(requirements.read_text(), tmp_path) == []  # the packages are installed here
    code = f"""
import sys
from importlib import import_module, metadata
from pathlib import Path
from scripts.gpu_check.stand_ins import write_stand_ins
folder = Path({str(tmp_path)!r})
written = write_stand_ins(Path({str(requirements)!r}).read_text(), folder)
sys.path.append(str(folder))
for name in written:
    print(name, metadata.version(name), import_module(name.replace("-", "_")).__file__.startswith(str(folder)))
from av.container import InputContainer
from av.subtitles.stream import SubtitleStream
from av.video.reformatter import ColorRange
import av
print(av.VideoFrame | InputContainer | None, {{ColorRange.JPEG: 2}})
"""
    without_packages = [sys.executable, "-S", "-c", code]
    done = subprocess.run(without_packages, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    versions = {name: re.search(rf"^{name}[=>]=(.+)$", requirements.read_text(), re.MULTILINE) for name in STAND_INS}
    assert done.stdout.splitlines()[:-1] == [f"{name} {found[1]} True" for name, found in versions.items() if found]


def kernel(generation: int, body: bytes) -> bytes:
    """Return a kernel as libraries of CUDA hold it: a header of 64 bytes with both lengths and the card's generation."""
    return struct.pack("<HHIQ", 2, 0x101, 64, len(body)) + bytes(12) + struct.pack("<I", generation) + bytes(32) + body


def kernels(*entries: bytes) -> bytes:
    """Return a set of kernels after its header."""
    return FATBIN + struct.pack("<Q", sum(map(len, entries))) + b"".join(entries)


def test_only_the_kernels_for_hopper_stay_in_a_library() -> None:
    old, new, next_one = kernel(80, b"a" * 40), kernel(90, b"b" * 24), kernel(100, b"c" * 8)
    library = b"code" + kernels(old, new, next_one) + b"more" + kernels(old) + b"end"
    found = only_hopper(library)
    gone, sizes = bytes(len(old) + len(next_one)), struct.pack("<Q", len(new))
    assert found == b"code" + FATBIN + sizes + new + gone + b"more" + FATBIN + bytes(8) + bytes(len(old)) + b"end"
    with pytest.raises(ValueError, match="no kernels for Hopper"):
        only_hopper(kernels(old))


class Tries(Report):
    """A list of checks with one figure and one failure; with `broken`, it crashes."""

    broken = False

    def run(self) -> None:
        self.say("a rate", True, "1 TFLOP/s", matmul=1e12)
        self.each(self.failing)
        if self.broken:
            raise RuntimeError("the list itself")

    def failing(self) -> None:
        raise ValueError("a check")


def test_a_lists_lines_become_a_profile_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, into = tmp_path / "lines.jsonl", tmp_path / "cards.json"
    monkeypatch.setenv(LINES, str(file))
    monkeypatch.setenv(FOLDER, os.environ["COMFYUI_PATH"])
    Tries("cpu").begin_to_end()
    lines = lines_of(file)
    assert [line.verdict for line in lines] == ["INFO", "PASS", "FAIL", "INFO"]
    assert main([str(file), "--card", "l4", "--into", str(into)]) == 0
    assert read_cards(into)["l4"].matmul == 1e12
    row = row_of_report(lines)
    assert row.comfyui == comfyui_name(Path(os.environ["COMFYUI_PATH"]))
    assert (row.run, row.result) == ("scripts/gpu.sh on cpu: tries", "1 passed, 1 failed")
    crashing = Tries("cpu")
    crashing.broken = True
    with pytest.raises(RuntimeError):
        crashing.begin_to_end()
    assert row_of_report(lines_of(file)).result == "2 passed, 2 failed, 1 error"
    monkeypatch.delenv(FOLDER)
    Tries("cpu").begin_to_end()
    assert [line.verdict for line in lines_of(file)][-4:] == ["FAIL", "PASS", "FAIL", "INFO"]


def test_transports_are_counted_in_nccls_log() -> None:
    """The lines are of NCCL 2.28 on cards without P2P, and on two that have it."""
    told = """
host:71:90 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
host:71:90 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct
host:71:90 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[2] via P2P/CUMEM
host:71:90 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
host:71:90 [0] NCCL INFO Connected all rings
"""
    assert transports(told) == {"SHM/direct/direct": 2, "P2P/CUMEM": 1, "NET/Socket/0": 1}


def test_missing_requirements_of_comfyui_are_named() -> None:
    requirements = "torch\nsafetensors>=0.4.2\nno-such-package==1.2\n\n#non essential dependencies:\nnor-this~=2.0\n"
    assert missing(requirements) == ["no-such-package"]
    assert missing((Path(os.environ["COMFYUI_PATH"]) / "requirements.txt").read_text()) == []

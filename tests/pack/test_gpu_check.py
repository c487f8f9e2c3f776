"""The checks for machines with GPUs, on the CPU: whoever gets a card must not find that they end at their first line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_backend.comfyui_folder import FOLDER
from parallel_backend.plan.calibrate import main
from parallel_backend.plan.gpu_report import lines_of
from parallel_backend.plan.predict.cards import read_cards
from parallel_backend.weights.formats.gguf_blocks import BLOCK_TYPES
from parallel_backend.weights.loading.rounds import Way
from scripts.gpu_check.__main__ import LISTS
from scripts.gpu_check.connections import transports
from scripts.gpu_check.prompts import missing
from scripts.gpu_check.report import LINES, Report
from scripts.tested import comfyui_name, row_of_report
from tests.support.selection import thorough

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LINE = re.compile(r"^\[\d\] (PASS|FAIL|INFO) ([^:]+):", re.MULTILINE)
SEVERAL = ("connections", "many", "pipeline")
SMALL = "FLUX.1, small"
PASSED = {
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
    "formats": {
        *(f"GGUF {kind.name}" for kind in BLOCK_TYPES),
        *(f"a layer, {name}" for name in ("fp8 fast", "scaled fp8", "NVFP4", "MXFP8", "INT8")),
    },
    "races": {"streamed, sixteen blocks"},
    "shares": set(),
    "prompts": {
        *(f"a sprite, {ranks} workers" for ranks in (1, 2)),
        *(f"{name}, {weights}" for name in ("a sprite", "a Wan video") for weights in ("bf16", "fp8 weights")),
        *("a LoRA", "without the LoRA again", "a parallel VAE", "Unload", "Cancel", "kill -9", "out of memory"),
        *(f"after {fault}" for fault in ("Unload", "Cancel", "kill -9", "out of memory")),
        "nothing is left",
    },
    "connections": {
        "uneven and empty splits",
        "a hop of a ring",
        "gathers into memory that comes and goes",
        "communicators again and again",
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
"""What a CPU can answer: the results are ComfyUI's, or one rank's, to 1e-5 or to the last bit."""

TOLD = {
    "one": {
        "memory, 4 patches",
        "a pin that fails",
        "the GPU is busy",
        "nothing waits in the loop",
        f"{SMALL}, eager, a step against ComfyUI's",
    },
    "many": {"the same noise everywhere", "the word of Cancel, ring 2", "a hop hides behind attention"},
    "compiled": {f"{SMALL}, compiled by aot_eager, a step against ComfyUI's", "FLUX.1-dev, compiled by aot_eager"},
    "formats": {"GGUF's kernels"},
    "races": set(),
    "shares": {
        "what plans go by",
        *(f"{SMALL}, a rank's share, {plan}" for plan in ("1 worker", "ulysses 2", "ring 2")),
        f"{SMALL}, a step against ComfyUI's forward",
    },
    "prompts": set(),
    "connections": {"NCCL's transports"},
    "pipeline": {
        "no hang while kernels are loaded",
        "no hang while kernels for matrices are loaded",
        "PipeFusion hides its hops",
    },
}
"""Some of what only a GPU can."""


@thorough
@pytest.mark.parametrize("checks", PASSED)
def test_the_checks_for_gpus_run(checks: str) -> None:
    several = TORCHRUN if checks in SEVERAL else ()
    command = [sys.executable, *several, "-m", "scripts.gpu_check", checks, "--device", "cpu"]
    environment = os.environ | {FOLDER: os.environ["COMFYUI_PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = set(LINE.findall(done.stdout))
    assert done.returncode == 0, done.stderr
    assert not [name for verdict, name in found if verdict == "FAIL"], done.stdout
    assert {name for verdict, name in found if verdict == "PASS"} == PASSED[checks]
    assert TOLD[checks] <= {name for verdict, name in found if verdict == "INFO"}


def test_the_checks_for_gpus_take_less_than_nine_minutes() -> None:
    limits = re.findall(r"^check \S+ (?:FAIL|INFO) (\d+) ", (ROOT / "scripts/gpu.sh").read_text(), re.MULTILINE)
    assert len(limits) == len(LISTS) + 2  # stages twice, and the doctor
    assert sum(map(int, limits)) < 540


def test_every_list_has_what_it_is_to_pass() -> None:
    assert LISTS.keys() == PASSED.keys() == TOLD.keys()


class Tries(Report):
    """A list of one figure, one failure, and if it is told so, a crash."""

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


def test_transports_are_counted_from_what_nccl_logs() -> None:
    """Lines of NCCL 2.28 on cards without P2P, and on two that have it."""
    told = """
host:71:90 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
host:71:90 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct
host:71:90 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[2] via P2P/CUMEM
host:71:90 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
host:71:90 [0] NCCL INFO Connected all rings
"""
    assert transports(told) == {"SHM/direct/direct": 2, "P2P/CUMEM": 1, "NET/Socket/0": 1}


def test_what_is_missing_of_comfyuis_requirements_is_named() -> None:
    requirements = "torch\nsafetensors>=0.4.2\nno-such-package==1.2\n\n#non essential dependencies:\nnor-this~=2.0\n"
    assert missing(requirements) == ["no-such-package"]
    assert missing((Path(os.environ["COMFYUI_PATH"]) / "requirements.txt").read_text()) == []

"""The checks for machines with GPUs, on the CPU: whoever gets a card must not find that they end at their first line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_backend.comfyui_folder import FOLDER
from parallel_backend.weights.loading.rounds import Way
from tests.selection import thorough

ROOT = Path(__file__).parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LINE = re.compile(r"^\[\d\] (PASS|FAIL|INFO) ([^:]+):", re.MULTILINE)
SMALL = "FLUX.1, small"
PASSED = {
    "one": {
        *(
            f"kernel sdpa torch.{kind}"
            for kind in ("bfloat16 128", "float16 64", "bfloat16 72", "bfloat16 512", "float32 128")
        ),
        "streamed weights",
        f"{SMALL} in fp32, the result",
        f"{SMALL}, eager, the result",
        f"{SMALL}, compiled by aot_eager, the result",
        f"{SMALL}, compiled by aot_eager, all blocks",
    },
    "connections": {
        "uneven and empty splits",
        "a hop of a ring",
        "gathers into memory that comes and goes",
        "communicators again and again",
    },
    "many": {"ulysses 2", "ring 2", "sharded weights, ulysses 2", *(f"loading, {way.value}" for way in Way)},
    "pipeline": {"pipefusion 2, 4 patches"},
}
"""What a CPU can answer: the results are ComfyUI's, or one rank's, to 1e-5."""

TOLD = {
    "one": {
        "memory, 4 patches",
        "a pin that fails",
        "the GPU is busy",
        "nothing waits in the loop",
        f"{SMALL}, eager, a step against ComfyUI's",
    },
    "many": {"the same noise everywhere", "the word of Cancel, ring 2", "a hop hides behind attention"},
    "connections": set(),
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
    several = () if checks == "one" else TORCHRUN
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
    assert len(limits) == 6
    assert sum(map(int, limits)) < 540

"""What a step asks of a GPU, counted without one: it may only become less. The table is in docs/dry-run.md."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dry_run import CASES
from benchmarks.plan_predictions import BY_DIFFUSERS
from parallel_backend.plan.operations import OF_A_BLOCK, PATCHED, RING, RING_HOP, ULYSSES, of_a_block
from tests.selection import thorough

ROOT = Path(__file__).parents[2]

LIMITS = {
    "FLUX.1-dev, one rank": (189, {"DoubleStreamBlock": 43, "SingleStreamBlock": 15}, 0),
    "FLUX.1-dev, ulysses 2": (207, {"DoubleStreamBlock": 46, "SingleStreamBlock": 18}, 9),
    "FLUX.1-dev, ulysses 4": (207, {"DoubleStreamBlock": 46, "SingleStreamBlock": 18}, 9),
    "FLUX.1-dev, ring 4": (291, {"DoubleStreamBlock": 67, "SingleStreamBlock": 39}, 25),
    "FLUX.1-dev, ring 2 x ulysses 4": (247, {"DoubleStreamBlock": 56, "SingleStreamBlock": 28}, 17),
    "FLUX.1-dev, pipefusion 4, first stage": (407, {"DoubleStreamBlock": 47}, 9),
    "FLUX.1-dev, pipefusion 4, second stage": (403, {"DoubleStreamBlock": 47}, 9),
    "FLUX.1-dev, pipefusion 4, last stage": (357, {"SingleStreamBlock": 19}, 8),
    "FLUX.2-dev, one rank": (190, {"DoubleStreamBlock": 42, "SingleStreamBlock": 15}, 0),
    "FLUX.2-dev, ulysses 2": (208, {"DoubleStreamBlock": 45, "SingleStreamBlock": 18}, 9),
    "FLUX.2-dev, ulysses 4": (208, {"DoubleStreamBlock": 45, "SingleStreamBlock": 18}, 9),
    "FLUX.2-dev, ulysses 8": (208, {"DoubleStreamBlock": 45, "SingleStreamBlock": 18}, 9),
    "Wan 2.2 14B, one rank": (117, {"WanAttentionBlock": 31}, 0),
    "Wan 2.2 14B, ulysses 2": (127, {"WanAttentionBlock": 34}, 5),
    "Wan 2.2 14B, ring 2 x ulysses 2": (147, {"WanAttentionBlock": 44}, 9),
    "Wan 2.2 14B, cfg 2 x ulysses 4": (132, {"WanAttentionBlock": 34}, 6),
    "Qwen-Image, one rank": (157, {"QwenImageTransformerBlock": 49}, 0),
    "Qwen-Image, ulysses 2": (168, {"QwenImageTransformerBlock": 52}, 5),
    "Qwen-Image, ulysses 4": (168, {"QwenImageTransformerBlock": 52}, 5),
    "Qwen-Image, ulysses 8": (168, {"QwenImageTransformerBlock": 52}, 5),
    "Z-Image, one rank": (215, {"JointTransformerBlock": 26}, 0),
    "Z-Image, ring 2 x ulysses 2": (278, {"JointTransformerBlock": 40}, 17),
    "HunyuanVideo 1.5, one rank": (187, {"DoubleStreamBlock": 43}, 0),
    "HunyuanVideo 1.5, ulysses 8": (198, {"DoubleStreamBlock": 46}, 5),
    "MiniMax-H3, one rank": (173, {"DiTBlock": 36}, 0),
    "MiniMax-H3, ulysses 2": (186, {"DiTBlock": 40}, 6),
    "MiniMax-H3, ulysses 4": (186, {"DiTBlock": 40}, 6),
    "MiniMax-H3, ulysses 8": (186, {"DiTBlock": 40}, 6),
    "CogVideoX 1.5, one rank": (165, {"CogVideoXBlock": 59}, 0),
    "CogVideoX 1.5, ulysses 2": (175, {"CogVideoXBlock": 62}, 5),
    "CogVideoX 1.5, ring 2 x ulysses 2": (195, {"CogVideoXBlock": 72}, 9),
    "CogVideoX 1.5, cfg 2 x ring 2 x ulysses 2": (200, {"CogVideoXBlock": 72}, 10),
}
"""Kernels of a step of two blocks of each kind, of a block of each kind, and collectives; of the steady state."""

DECODES = {
    "FLUX.2's VAE, one rank": (159, 0, 1.8),
    "FLUX.2's VAE, 4 ranks": (2441, 70, 0.45),
    "Wan 2.1's VAE, one rank": (1248, 0, 8.3),
    "Wan 2.1's VAE, 4 ranks": (2040, 128, 2.1),
}
"""Kernels and collectives of a decode of a picture, or of nine frames, and the GB that tensors take at its peak."""

ATTENTION = 2
"""All-to-alls of an attention under Ulysses: there, and back."""

HOP = 2
"""Transfers of a hop of Ring: a send and a receive."""

OF_COMFYUI = {
    "Wan 2.2 14B": {"sinusoidal_embedding_1d": 1},
    "MiniMax-H3": {"_forward": 5, "rope_freqs": 1},  # it reads the timestep and copies positions
}
"""Functions in which ComfyUI's own forward waits for the device as well, before the first block: places a forward."""

OUTPUTS = {"MiniMax-H3": 2}
"""Of models that have not one: the video, and its sound."""


def counted(*options: str) -> dict[str, dict[str, Any]]:
    """By a process of its own: it stands in for the driver and for the other ranks."""
    command = [sys.executable, "-m", "benchmarks.dry_run", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {case.pop("case"): case for case in found}


@pytest.fixture(scope="module")
def short() -> dict[str, dict[str, Any]]:
    """All cases with two blocks of each kind."""
    return counted("--short")


@pytest.mark.parametrize("case", LIMITS)
def test_no_step_asks_for_more(case: str, short: dict[str, dict[str, Any]]) -> None:
    kernels, blocks, collectives = LIMITS[case]
    found = short[case]
    assert found["kernels"] <= kernels
    assert found["blocks"].keys() == blocks.keys()
    assert all(found["blocks"][kind] <= limit for kind, limit in blocks.items())
    assert found["collectives"] <= collectives


@pytest.mark.parametrize("case", LIMITS)
def test_nothing_in_the_loop_waits_for_the_device(case: str, short: dict[str, dict[str, Any]]) -> None:
    own = OF_COMFYUI.get(case.partition(",")[0], {})
    found = Counter(wait.partition(" at ")[2].partition(" ")[0] for wait in short[case]["waits"])
    assert found <= Counter(own), short[case]["waits"]


@pytest.mark.parametrize("case", [case for case in LIMITS if "ulysses" in case or "ring" in case])
def test_an_attention_is_two_all_to_alls_and_its_hops_and_the_output_is_gathered_once(
    case: str, short: dict[str, dict[str, Any]]
) -> None:
    model, degrees = CASES[case]
    each = ATTENTION * ("ulysses" in degrees) + HOP * (degrees.get("ring", 1) - 1)
    guidance = 1 if "cfg" in case else 0
    assert short[case]["collectives"] == each * short[case]["blocks_run"] + OUTPUTS.get(model, 1) + guidance


def test_plans_go_by_what_blocks_start(short: dict[str, dict[str, Any]]) -> None:
    """The most of any model, on one rank."""
    counts = [short[case]["blocks"] for case, (_, degrees) in CASES.items() if not degrees]
    assert {kind: max(each.get(kind, 0) for each in counts) for each in counts for kind in each} == OF_A_BLOCK


@pytest.mark.parametrize("case", [case for case in LIMITS if "one rank" not in case])
def test_plans_go_by_what_an_attention_over_ranks_starts(case: str, short: dict[str, dict[str, Any]]) -> None:
    """Exactly for FLUX.1; other models differ by one kernel at most, where blocks of one class do or cuts are uneven."""
    model, degrees = CASES[case]
    ring = degrees.get("ring", 1)
    added = (ULYSSES - ATTENTION) * ("ulysses" in degrees) + PATCHED * ("pipefusion" in degrees)
    added += (RING + (ring - 1) * (RING_HOP - HOP)) * (ring > 1)
    off = 0 if model == "FLUX.1-dev" else 1
    assert all(abs(found - of_a_block(kind) - added) <= off for kind, found in short[case]["blocks"].items())


@pytest.mark.parametrize("case", LIMITS)
def test_a_rank_needs_what_the_formula_says(case: str, short: dict[str, dict[str, Any]]) -> None:
    """Never more, or a plan that was said to fit runs out of memory; nor so much less that plans that fit are refused."""
    peak, formula = short[case]["peak"], short[case]["formula"]
    assert peak <= formula <= 1.6 * peak


@pytest.mark.parametrize("case", DECODES)
def test_no_decode_asks_for_more_or_waits_before_its_end(case: str, short: dict[str, dict[str, Any]]) -> None:
    kernels, collectives, peak = DECODES[case]
    found = short[case]
    assert found["kernels"] <= kernels
    assert found["collectives"] <= collectives
    assert found["peak"] <= peak * 1e9
    assert not found["waits"]


@thorough
def test_published_times_go_by_what_diffusers_own_blocks_start() -> None:
    found = {name: tuple(case["kernels"]) for name, case in counted("--diffusers").items()}
    assert found.items() <= BY_DIFFUSERS.items()


@thorough
def test_one_rank_starts_no_more_kernels_than_comfyui() -> None:
    """In a whole step, with sampler and preview, against ComfyUI's forward alone."""
    own = counted("--own", "--only", "FLUX.1")["FLUX.1-dev"]["kernels"]
    found = counted("--only", "FLUX.1-dev, one rank")["FLUX.1-dev, one rank"]
    assert found["kernels"] <= min(own, 1_450)
    assert counted("--only", "FLUX.1-dev, ulysses 4")["FLUX.1-dev, ulysses 4"]["kernels"] <= 1_900

"""Counts of a step's operations on a GPU, without a GPU. The counts may only decrease. The table is in
docs/measured/dry-run.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dry_run import CASES
from parallel_backend.plan.predict.kernel_counts import (
    CHUNK,
    FP8,
    OF_A_BLOCK,
    PASSES_OF_A_BLOCK,
    PATCHED,
    RING,
    RING_HOP,
    ULYSSES,
    of_a_block,
)
from tests.support.comfyuis import is_listed, tell_new
from tests.support.selection import thorough

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/measured/dry-run.md"
COMMAND = (sys.executable, "-m", "benchmarks.dry_run")

LIMITS = {
    "FLUX.1-dev, one rank": (189, {"DoubleStreamBlock": 43, "SingleStreamBlock": 15}, 0, 0),
    "FLUX.1-dev, ulysses 2": (207, {"DoubleStreamBlock": 46, "SingleStreamBlock": 18}, 9, 113_508_352),
    "FLUX.1-dev, ulysses 2, streamed weights": (
        211,
        {"DoubleStreamBlock": 46, "SingleStreamBlock": 18},
        9,
        2_039_200_768,
    ),
    "FLUX.1-dev, ulysses 2, sharded weights": (
        207,
        {"DoubleStreamBlock": 46, "SingleStreamBlock": 18},
        13,
        1_076_354_560,
    ),
    "FLUX.1-dev, ulysses 4": (207, {"DoubleStreamBlock": 46, "SingleStreamBlock": 18}, 9, 85_327_872),
    "FLUX.1-dev, ulysses 4, heads in 3 chunks": (
        239,
        {"DoubleStreamBlock": 54, "SingleStreamBlock": 26},
        25,
        85_327_872,
    ),
    "FLUX.1-dev, ulysses 4, exchange fp8": (
        315,
        {"DoubleStreamBlock": 73, "SingleStreamBlock": 45},
        9,
        44_187_648,
    ),
    "FLUX.1-dev, ring 4": (291, {"DoubleStreamBlock": 67, "SingleStreamBlock": 39}, 13, 170_262_528),
    "FLUX.1-dev, ring 2 x ulysses 4": (247, {"DoubleStreamBlock": 56, "SingleStreamBlock": 28}, 13, 71_237_632),
    "FLUX.1-dev, pipefusion 4, first stage": (407, {"DoubleStreamBlock": 47}, 9, 28_311_553),
    "FLUX.1-dev, pipefusion 4, second stage": (403, {"DoubleStreamBlock": 47}, 9, 28_311_553),
    "FLUX.1-dev, pipefusion 4, last stage": (365, {"SingleStreamBlock": 19}, 8, 1_048_576),
    "FLUX.2-dev, one rank": (190, {"DoubleStreamBlock": 42, "SingleStreamBlock": 15}, 0, 0),
    "FLUX.2-dev, ulysses 2": (208, {"DoubleStreamBlock": 45, "SingleStreamBlock": 18}, 9, 227_016_704),
    "FLUX.2-dev, ulysses 4": (208, {"DoubleStreamBlock": 45, "SingleStreamBlock": 18}, 9, 170_655_744),
    "FLUX.2-dev, ulysses 8": (208, {"DoubleStreamBlock": 45, "SingleStreamBlock": 18}, 9, 100_007_936),
    "Wan 2.2 14B, one rank": (116, {"WanAttentionBlock": 31}, 0, 0),
    "Wan 2.2 14B, ulysses 2": (126, {"WanAttentionBlock": 34}, 5, 1_553_126_400),
    "Wan 2.2 14B, ulysses 2, heads in 4 chunks": (150, {"WanAttentionBlock": 46}, 17, 1_553_126_400),
    "Wan 2.2 14B, ring 2 x ulysses 2": (146, {"WanAttentionBlock": 44}, 7, 1_555_545_600),
    "Wan 2.2 14B, cfg 2 x ulysses 4": (131, {"WanAttentionBlock": 34}, 6, 1_187_827_200),
    "Wan 2.2 14B, pipefusion 2, first stage": (142, {"WanAttentionBlock": 33}, 4, 774_144_001),
    "Wan 2.2 14B, pipefusion 2, last stage": (184, {"WanAttentionBlock": 33}, 4, 19_353_600),
    "Qwen-Image, one rank": (157, {"QwenImageTransformerBlock": 49}, 0, 0),
    "Qwen-Image, ulysses 2": (168, {"QwenImageTransformerBlock": 52}, 5, 53_739_520),
    "Qwen-Image, ulysses 4": (168, {"QwenImageTransformerBlock": 52}, 5, 40_501_248),
    "Qwen-Image, ulysses 8": (168, {"QwenImageTransformerBlock": 52}, 5, 23_855_104),
    "Z-Image, one rank": (215, {"JointTransformerBlock": 26}, 0, 0),
    "Z-Image, ring 2 x ulysses 2": (278, {"JointTransformerBlock": 40}, 13, 128_200_704),
    "HunyuanVideo 1.5, one rank": (187, {"DoubleStreamBlock": 43}, 0, 0),
    "HunyuanVideo 1.5, ulysses 8": (198, {"DoubleStreamBlock": 46}, 5, 407_141_504),
    "MiniMax-H3, one rank": (173, {"DiTBlock": 36}, 0, 0),
    "MiniMax-H3, ulysses 2": (186, {"DiTBlock": 40}, 6, 3_162_066_944),
    "MiniMax-H3, ulysses 4": (186, {"DiTBlock": 40}, 6, 2_386_194_432),
    "MiniMax-H3, ulysses 8": (186, {"DiTBlock": 40}, 6, 1_407_709_184),
    "CogVideoX 1.5, one rank": (165, {"CogVideoXBlock": 59}, 0, 0),
    "CogVideoX 1.5, ulysses 2": (175, {"CogVideoXBlock": 62}, 5, 560_007_168),
    "CogVideoX 1.5, ring 2 x ulysses 2": (195, {"CogVideoXBlock": 72}, 7, 562_873_344),
    "CogVideoX 1.5, cfg 2 x ring 2 x ulysses 2": (200, {"CogVideoXBlock": 72}, 8, 585_851_904),
}
"""Limits of a step in the steady state: kernels of a step of two blocks of each kind, kernels of a block of each kind,
collectives, and bytes sent.

Bytes that streamed weights copy from the host count as sent. With another ComfyUI, the kernels of one rank are those of its own
forward, and the limits apply only to the kernels that a split adds.
"""

IN_BLOCKS = {
    "FLUX.1-dev in Q4_K, no room, one rank": 1589,
    "FLUX.1-dev in Q4_K, with room, one rank": 189,
    "FLUX.1-dev in Q4_K, no room, pipefusion 4, first stage": 2007,
    "FLUX.1-dev in Q4_K, with room, pipefusion 4, first stage": 407,
}
"""Kernels of such a step of a GGUF file whose weights eager operations expand. With room they equal those of a plain file."""

DECODES = {
    "FLUX.1's VAE, one rank": (153, 0, 1.8),
    "FLUX.1's VAE, 4 ranks": (2434, 70, 0.45),
    "FLUX.2's VAE, one rank": (159, 0, 1.8),
    "FLUX.2's VAE, 4 ranks": (2441, 70, 0.45),
    "Wan 2.1's VAE, one rank": (1248, 0, 8.3),
    "Wan 2.1's VAE, 4 ranks": (2040, 128, 2.1),
}
"""Kernels and collectives of a decode of a picture, or of nine frames, and the peak of its tensors in GB."""

LATER = (
    "FLUX.1-dev, ulysses 4",
    "Wan 2.2 14B, ulysses 2, heads in 4 chunks",
    "FLUX.1-dev, pipefusion 4, second stage",
    "FLUX.1-dev in Q4_K, no room, one rank",
    "FLUX.1-dev in Q4_K, no room, pipefusion 4, first stage",
    "FLUX.1-dev in Q4_K, with room, pipefusion 4, first stage",
    "FLUX.2-dev, one rank",
    "FLUX.2-dev, ulysses 2",
    "FLUX.2-dev, ulysses 4",
    "FLUX.2-dev, ulysses 8",
    "HunyuanVideo 1.5, one rank",
    "HunyuanVideo 1.5, ulysses 8",
    "Wan 2.2 14B, ulysses 2",
    "Wan 2.2 14B, cfg 2 x ulysses 4",
    "Qwen-Image, ulysses 4",
    "Qwen-Image, ulysses 8",
    "MiniMax-H3, ulysses 4",
    "MiniMax-H3, ulysses 8",
    "CogVideoX 1.5, ulysses 2",
    "CogVideoX 1.5, ring 2 x ulysses 2",
    "FLUX.1-dev, ulysses 2, streamed weights",
    "FLUX.1-dev, ulysses 2, sharded weights",
    "Wan 2.2 14B, pipefusion 2, first stage",
    "Wan 2.2 14B, pipefusion 2, last stage",
    "FLUX.1's VAE, one rank",
    "FLUX.1's VAE, 4 ranks",
    "Wan 2.1's VAE, one rank",
    "FLUX.1-dev, ulysses 2",
    "FLUX.1-dev, ring 4",
    "FLUX.1-dev in Q4_K, with room, one rank",
    "FLUX.2's VAE, one rank",
    "Qwen-Image, ulysses 2",
    "Z-Image, ring 2 x ulysses 2",
    "Wan 2.1's VAE, 4 ranks",
)
"""Cases that the quick run skips. It has each kind of split and each class of blocks: Ulysses on FLUX.1 and MiniMax-H3, Ring with
Ulysses on FLUX.1, Wan and CogVideoX, and every class on one rank. vae/test_comfyui decodes videos on ranks.
"""

ATTENTION = 2
"""All-to-alls of an attention under Ulysses: one before and one after the attention."""

HOP = 1
"""Transfers of a hop of Ring: one all-to-all that sends only to the next rank."""

OF_COMFYUI = {
    "MiniMax-H3": {"_forward": 5, "rope_freqs": 1},  # the forward reads the timestep and copies positions
}
"""Functions of ComfyUI's own forward that also wait for the device, before the first block, with their waits in
each forward.
"""

OF_A_STEP = Counter(repeat=1, clone=1, copy_=2, add=1, div=2, cat=2, add_=1, zeros_like=1, sub=2)
"""Kernels of euler's step and of a preview, which ComfyUI's process launches outside of its model's forward."""

OF_SOUND = OF_A_STEP + Counter(_to_copy=2, clone=2, mul=3, cat=2)
"""The same kernels plus those of ComfyUI's BaseModel for video packed with sound: the text's copy, the sound's timestep,
packing.
"""

OUTPUTS = {"MiniMax-H3": 2}
"""Numbers of outputs of models that have several: the video, and its sound."""


def counted(*options: str) -> dict[str, dict[str, Any]]:
    """Return the cases that the command prints. It runs in another process, as it replaces the driver and the other ranks."""
    done = subprocess.run([*COMMAND, "--json", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {case.pop("case"): case for case in found}


def each(cases: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrise a test with these cases. The quick run skips some."""
    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=thorough if case in LATER else ()) for case in cases]
    )


@pytest.fixture(scope="module")
def short(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Return all cases with two blocks of each kind."""
    later = () if request.config.getoption("--all") else LATER
    return counted("--short", *(option for case in later for option in ("--but", case)))


def on_one_rank(case: str) -> str:
    """Return the name of the case of the same model without a split."""
    return f"{case.partition(',')[0]}, one rank"


@each(LIMITS)
def test_no_step_exceeds_its_limits(case: str, short: dict[str, dict[str, Any]]) -> None:
    kernels, blocks, collectives, sent = LIMITS[case]
    found = short[case]
    if not is_listed():
        one, (least, each_block, *_) = short[on_one_rank(case)], LIMITS[on_one_rank(case)]
        kernels += one["kernels"] - least
        blocks = {kind: limit + one["blocks"][kind] - each_block[kind] for kind, limit in blocks.items()}
    assert found["kernels"] <= kernels
    assert found["blocks"].keys() == blocks.keys()
    assert all(found["blocks"][kind] <= limit for kind, limit in blocks.items())
    assert found["collectives"] <= collectives
    assert found["sent"] <= sent


@each(LIMITS)
def test_no_operation_of_the_loop_waits_for_the_device(case: str, short: dict[str, dict[str, Any]]) -> None:
    own = OF_COMFYUI.get(case.partition(",")[0], {})
    found = Counter(wait.partition(" at ")[2].partition(" ")[0] for wait in short[case]["waits"])
    assert found <= Counter(own), short[case]["waits"]


@each(case for case in LIMITS if "ulysses" in case or "ring" in case)
def test_each_chunk_takes_two_all_to_alls_and_each_hop_one_and_outputs_are_gathered_once(
    case: str, short: dict[str, dict[str, Any]]
) -> None:
    model, degrees = CASES[case]
    block = ATTENTION * degrees.get("head_chunks", 1) * ("ulysses" in degrees) + HOP * (degrees.get("ring", 1) - 1)
    block += degrees.get("weights") == "sharded"  # the gather of a block
    guidance = 1 if "cfg" in case else 0
    assert short[case]["collectives"] == block * short[case]["blocks_run"] + OUTPUTS.get(model, 1) + guidance


def test_plans_assume_the_kernels_that_blocks_launch(short: dict[str, dict[str, Any]]) -> None:
    """Plans assume the most kernels of any model on one rank."""
    counts = [short[case]["blocks"] for case, (_, degrees) in CASES.items() if not degrees and case in short]
    most = {kind: max(each.get(kind, 0) for each in counts) for each in counts for kind in each}
    assert most.keys() == OF_A_BLOCK.keys()
    tell_new("kernels of a block", {f"{kind} ({most[kind]})" for kind in most if most[kind] != OF_A_BLOCK[kind]})


def test_plans_assume_the_passes_over_features_that_blocks_make(short: dict[str, dict[str, Any]]) -> None:
    """Plans assume the most passes of any model on one rank. FLUX.2, which `--all` counts, makes the most of its classes."""
    counts = [short[case]["passes"] for case, (_, degrees) in CASES.items() if not degrees and case in short]
    most = {kind: round(max(each.get(kind, 0.0) for each in counts)) for each in counts for kind in each}
    assert most.keys() == PASSES_OF_A_BLOCK.keys()
    assert not is_listed() or all(most[kind] <= PASSES_OF_A_BLOCK[kind] for kind in most)
    fewer = set() if "FLUX.2-dev, one rank" in short else {"DoubleStreamBlock", "SingleStreamBlock"}
    others = {kind for kind in most if most[kind] != PASSES_OF_A_BLOCK[kind]} - fewer
    tell_new("passes of a block", {f"{kind} ({most[kind]})" for kind in others})


@each(case for case in LIMITS if "one rank" not in case)
def test_plans_assume_the_kernels_that_a_distributed_attention_launches(
    case: str, short: dict[str, dict[str, Any]]
) -> None:
    """FLUX.1 matches exactly. Other models differ by at most one kernel, if blocks of one class differ or cuts are uneven.

    In patches, the assumed number is an upper bound.
    """
    model, degrees = CASES[case]
    ring = degrees.get("ring", 1)
    chunks = degrees.get("head_chunks", 1)
    added = (ULYSSES - ATTENTION + (chunks - 1) * (CHUNK - ATTENTION)) * ("ulysses" in degrees)
    added += FP8 * (degrees.get("exchange") == "fp8") + PATCHED * ("pipefusion" in degrees)
    added += (RING + (ring - 1) * (RING_HOP - HOP)) * (ring > 1)
    more = 0 if model == "FLUX.1-dev" else 1
    fewer = PATCHED if more and "pipefusion" in degrees else more
    alone = {kind: of_a_block(kind) for kind in OF_A_BLOCK} if is_listed() else short[on_one_rank(case)]["blocks"]
    assert all(-fewer <= found - alone[kind] - added <= more for kind, found in short[case]["blocks"].items())


@each(LIMITS)
def test_a_ranks_peak_is_close_below_the_formulas(case: str, short: dict[str, dict[str, Any]]) -> None:
    """A larger peak would let a plan run out of memory. A much smaller one would refuse plans that fit."""
    peak, formula = short[case]["peak"], short[case]["formula"]
    assert peak <= formula <= 1.6 * peak


@each(IN_BLOCKS)
def test_gguf_weights_are_expanded_without_a_wait_and_with_room_only_once(
    case: str, short: dict[str, dict[str, Any]]
) -> None:
    assert short[case]["kernels"] <= IN_BLOCKS[case]
    if "no room" in case:
        assert short[case]["peak"] <= short[case]["formula"] <= 1.6 * short[case]["peak"]
    assert not short[case]["waits"]


@each(DECODES)
def test_no_decode_exceeds_its_limits_or_waits_before_its_end(case: str, short: dict[str, dict[str, Any]]) -> None:
    kernels, collectives, peak = DECODES[case]
    found = short[case]
    assert found["kernels"] <= kernels
    assert found["collectives"] <= collectives
    assert found["peak"] <= peak * 1e9
    assert not found["waits"]


def rows(text: str) -> dict[str, dict[str, str]]:
    """Return the rows of tables by their first cell, the case; each row's cells are by the columns' names."""
    found: dict[str, dict[str, str]] = {}
    names: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| A "):
            names = [name.replace("Asked for", "By the formula") for name in cells]
        elif line.startswith("| ") and names:
            found[cells[0]] = dict(zip(names, cells, strict=True))
        elif not line:
            names = []
    return found


def test_the_page_has_a_row_for_each_case() -> None:
    assert list(rows(PAGE.read_text())) == [*CASES, *IN_BLOCKS, *DECODES]


@thorough
def test_the_page_equals_the_commands_output() -> None:
    """Compare the rows of FLUX.1 alone, as all rows take the command minutes."""
    printed = rows(subprocess.run([*COMMAND, "--only", "FLUX.1-dev,"], cwd=ROOT, capture_output=True, text=True).stdout)
    page = rows(PAGE.read_text())
    assert len(printed) == sum("FLUX.1-dev," in case for case in page)
    for case, found in printed.items():
        shared = found.keys() & page[case].keys() - {"A step of"}
        assert {name: page[case][name] for name in shared} == {name: found[name] for name in shared}


@thorough
def test_one_rank_launches_no_more_kernels_than_comfyui() -> None:
    """Our whole step, with sampler and preview, is compared with ComfyUI's forward alone."""
    own = counted("--own", "--only", "FLUX.1")["FLUX.1-dev"]["kernels"]
    found = counted("--only", "FLUX.1-dev, one rank")["FLUX.1-dev, one rank"]
    assert found["kernels"] <= min(own, 1_450)
    assert counted("--only", "FLUX.1-dev, ulysses 4")["FLUX.1-dev, ulysses 4"]["kernels"] <= 1_900


@thorough
def test_one_rank_launches_no_kernel_that_comfyui_does_not() -> None:
    """Kernels are compared by name, each difference accounted for: FLUX.1 and .2, Wan, Qwen-Image, MiniMax-H3 and LTX-2."""
    found = counted("--beside")
    assert len(found) == 6
    for name, case in found.items():
        named = OF_SOUND if name in ("MiniMax-H3", "LTX-2") else OF_A_STEP
        assert Counter(case["more"]) <= named, (name, case)

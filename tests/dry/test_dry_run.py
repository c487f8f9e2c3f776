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

from benchmarks.dry_run import CASES, IN_BLOCKS
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
    "FLUX.1-dev, one rank": (189, 0, 0),
    "FLUX.1-dev, ulysses 2, streamed weights": (211, 9, 2_039_200_768),
    "FLUX.1-dev, ulysses 2, sharded weights": (207, 13, 1_076_354_560),
    "FLUX.1-dev, ulysses 4": (207, 9, 85_327_872),
    "FLUX.1-dev, ulysses 4, heads in 3 chunks": (239, 25, 85_327_872),
    "FLUX.1-dev, ulysses 4, exchange fp8": (315, 9, 44_187_648),
    "FLUX.1-dev, ring 4": (291, 13, 170_262_528),
    "FLUX.1-dev, ring 2 x ulysses 4": (247, 13, 71_237_632),
    "FLUX.1-dev, pipefusion 4, first stage": (407, 9, 28_311_553),
    "FLUX.1-dev, pipefusion 4, second stage": (403, 9, 28_311_553),
    "FLUX.1-dev, pipefusion 4, last stage": (365, 8, 1_048_576),
    "FLUX.2-dev, one rank": (190, 0, 0),
    "FLUX.2-dev, ulysses 8": (208, 9, 100_007_936),
    "Wan 2.2 14B, one rank": (116, 0, 0),
    "Wan 2.2 14B, ulysses 2, heads in 4 chunks": (150, 17, 1_553_126_400),
    "Wan 2.2 14B, ring 2 x ulysses 2": (146, 7, 1_555_545_600),
    "Wan 2.2 14B, cfg 2 x ulysses 4": (131, 6, 1_187_827_200),
    "Wan 2.2 14B, pipefusion 2, first stage": (142, 4, 774_144_001),
    "Wan 2.2 14B, pipefusion 2, last stage": (184, 4, 19_353_600),
    "Qwen-Image, one rank": (157, 0, 0),
    "Qwen-Image, ulysses 8": (168, 5, 23_855_104),
    "Z-Image, one rank": (215, 0, 0),
    "Z-Image, ring 2 x ulysses 2": (278, 13, 128_200_704),
    "HunyuanVideo 1.5, one rank": (187, 0, 0),
    "HunyuanVideo 1.5, ulysses 8": (198, 5, 407_141_504),
    "MiniMax-H3, one rank": (173, 0, 0),
    "MiniMax-H3, ulysses 2": (186, 6, 3_162_066_944),
    "CogVideoX 1.5, one rank": (165, 0, 0),
    "CogVideoX 1.5, cfg 2 x ring 2 x ulysses 2": (200, 8, 585_851_904),
    "FLUX.1-dev in Q4_K, no room, one rank": (1589, 0, 0),
    "FLUX.1-dev in Q4_K, with room, one rank": (189, 0, 0),
    "FLUX.1-dev in Q4_K, no room, pipefusion 4, first stage": (2007, 9, 28_311_553),
    "FLUX.1-dev in Q4_K, with room, pipefusion 4, first stage": (407, 9, 28_311_553),
}
"""Limits of a step of two blocks of each kind in the steady state: kernels, collectives, and bytes sent.

Bytes that streamed weights copy from the host count as sent. Eager operations expand GGUF's weights; with room only once, so
that the kernels equal those of a plain file. With another ComfyUI, the kernels of one rank are those of its own
forward, and the limits apply only to the kernels that a split adds.
"""

DECODES = {
    "FLUX.1's VAE, one rank": (153, 0, 1.8),
    "FLUX.1's VAE, 4 ranks": (2434, 70, 0.45),
    "FLUX.2's VAE, one rank": (159, 0, 1.8),
    "FLUX.2's VAE, 4 ranks": (2441, 70, 0.45),
    "Wan 2.1's VAE, one rank": (1248, 0, 8.3),
    "Wan 2.1's VAE, 4 ranks": (2040, 128, 2.1),
}
"""Kernels and collectives of a decode of a picture, or of nine frames, and the peak of its tensors in GB."""

QUICK = (
    *(
        f"{model}, one rank"
        for model in ("FLUX.1-dev", "Wan 2.2 14B", "Qwen-Image", "Z-Image", "MiniMax-H3", "CogVideoX 1.5")
    ),
    "FLUX.1-dev, ulysses 4, heads in 3 chunks",
    "FLUX.1-dev, ulysses 4, exchange fp8",
    "FLUX.1-dev, ring 2 x ulysses 4",
    "FLUX.1-dev, pipefusion 4, first stage",
    "FLUX.1-dev, pipefusion 4, last stage",
    "MiniMax-H3, ulysses 2",
    "CogVideoX 1.5, cfg 2 x ring 2 x ulysses 2",
    "FLUX.2's VAE, 4 ranks",
)
"""Cases of the quick run: every class of blocks on one rank, each kind of split, and a decode on ranks."""

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
    """Parametrise a test with these cases. The quick run has only those in QUICK."""
    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=[thorough] * (case not in QUICK)) for case in cases]
    )


@pytest.fixture(scope="module")
def short(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Return the cases with two blocks of each kind."""
    wanted = {*LIMITS, *DECODES} if request.config.getoption("--all") else QUICK
    return counted("--short", *(f"--but={case}" for case in (*CASES, *IN_BLOCKS, *DECODES) if case not in wanted))


def on_one_rank(case: str) -> str:
    """Return the name of the case of the same model without a split."""
    return f"{case.partition(',')[0].removesuffix(' in Q4_K')}, one rank"


@each(LIMITS)
def test_a_step_stays_within_its_limits_and_waits_for_nothing(case: str, short: dict[str, dict[str, Any]]) -> None:
    """A peak above the formula's would let a plan run out of memory. One far below would refuse plans that fit."""
    kernels, collectives, sent = LIMITS[case]
    found, one = short[case], on_one_rank(case)
    if not is_listed():
        kernels += short[one]["kernels"] - LIMITS[one][0]
    assert found["kernels"] <= kernels
    assert found["collectives"] <= collectives
    assert found["sent"] <= sent
    assert "with room" in case or found["peak"] <= found["formula"] <= 1.6 * found["peak"]
    waits = Counter(wait.partition(" at ")[2].partition(" ")[0] for wait in found["waits"])
    assert waits <= Counter(OF_COMFYUI.get(case.partition(",")[0], {})), found["waits"]


@each(case for case in LIMITS if "ulysses" in case or "ring" in case)
def test_each_chunk_takes_two_all_to_alls_and_each_hop_one_and_outputs_are_gathered_once(
    case: str, short: dict[str, dict[str, Any]]
) -> None:
    model, degrees = CASES[case]
    block = ATTENTION * degrees.get("head_chunks", 1) * ("ulysses" in degrees) + HOP * (degrees.get("ring", 1) - 1)
    block += degrees.get("weights") == "sharded"  # the gather of a block
    guidance = 1 if "cfg" in case else 0
    assert short[case]["collectives"] == block * short[case]["blocks_run"] + OUTPUTS.get(model, 1) + guidance


def test_plans_assume_the_kernels_and_the_passes_over_features_of_blocks(short: dict[str, dict[str, Any]]) -> None:
    """Plans assume the most of any model on one rank. FLUX.2, which `--all` counts, makes the most passes of its classes."""
    alone = [short[case] for case, (_, degrees) in CASES.items() if not degrees and case in short]
    fewer = set() if "FLUX.2-dev, one rank" in short else {"DoubleStreamBlock", "SingleStreamBlock"}
    for name, counts, assumed in (("kernels", "blocks", OF_A_BLOCK), ("passes", "passes", PASSES_OF_A_BLOCK)):
        most = {
            kind: round(max(each[counts].get(kind, 0) for each in alone)) for each in alone for kind in each[counts]
        }
        assert most.keys() == assumed.keys()
        others = {kind for kind in most if most[kind] != assumed[kind]}
        if name == "passes":
            assert not is_listed() or all(most[kind] <= assumed[kind] for kind in fewer)
            others -= fewer
        tell_new(f"{name} of a block", {f"{kind} ({most[kind]})" for kind in others})


@each(case for case in LIMITS if case in CASES and "one rank" not in case)
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
def test_one_rank_launches_no_kernel_that_comfyui_does_not() -> None:
    """Kernels are compared by name, each difference accounted for: FLUX.1 and .2, Wan, Qwen-Image, MiniMax-H3 and LTX-2."""
    found = counted("--beside")
    assert len(found) == 6
    for name, case in found.items():
        named = OF_SOUND if name in ("MiniMax-H3", "LTX-2") else OF_A_STEP
        assert Counter(case["more"]) <= named, (name, case)

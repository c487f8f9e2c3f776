"""A ComfyUI with a changed model class: the class is proved, derived again, or refused with the measured error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.copies.changed import copied, plain, said
from tests.support.graphs.comfyui import PLANS, TOLERANCE, spread
from tests.support.graphs.derived import FOUND, PATIENCE
from tests.support.graphs.family_checks import assert_equal_run
from tests.support.graphs.flux import insert_after_model, queue_logged, step_by_step, ways
from tests.support.graphs.guidance import SKIPPING
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough

pytestmark = thorough
"""These tests start a ComfyUI each; `tests/proof` tests which faults a proof finds, and the cache of its verdicts."""

FILE = "comfy/ldm/wan/model.py"
EDITS = {
    "a block": (
        "        # cross-attention & ffn\n",
        "        x = x - 0.1 * x.mean(dim=1, keepdim=True)\n        # cross-attention & ffn\n",
    ),
    "its attention call": (
        "            self.v(x).view(b, s, n * d),\n",
        "            (self.v(x) - 0.1 * self.v(x).mean(dim=1, keepdim=True)).view(b, s, n * d),\n",
    ),
    "one more attention": (
        "        # cross-attention & ffn\n",
        "        x = x + 0.1 * optimized_attention(x, x, x, self.num_heads, transformer_options=transformer_options)\n"
        "        # cross-attention & ffn\n",
    ),
    "its head": (
        "self.norm(x), 1 + repeat_e(e[1], x))))",
        "self.norm(x - 0.1 * x.mean(dim=1, keepdim=True)), 1 + repeat_e(e[1], x))))",
    ),
}
READS_NEIGHBOURS = (
    "return self.forward_orig(x, timestep, context, clip_fea=clip_fea, freqs=freqs, transformer_options=transformer_options, "
    "**kwargs)[:, :, :t, :h, :w]",
    "out = self.forward_orig(x, timestep, context, clip_fea=clip_fea, freqs=freqs, transformer_options=transformer_options, "
    "**kwargs)\n        return (out + 0.1 * (x.roll(1, -2) + x.roll(-1, -2)))[:, :, :t, :h, :w]",
)
"""Edit after which the model reads, after its blocks, the latent's rows above and below, also those of other patches."""

UNPROVED = (
    READS_NEIGHBOURS[0],
    "if float(timestep.max()) > 999: freqs = freqs + 0 * x.mean()\n        " + READS_NEIGHBOURS[0],
)
"""Edit after which the model, in its first step, reads the latent before its blocks.

Middle pipeline stages have no latent, so they compute NaN.
"""

PATIENT = {"PARALLEL_DEADLINES": "proof=900"}
"""Environment with a longer deadline, for a child process of low priority next to other tests."""

DEADLINES = f"proof=900,derive={PATIENCE}"

CHECKING = re.compile(r"Checking WAN21_T2V on ComfyUI \S+, once")
EQUAL = "WAN21_T2V differs from all tested ComfyUI versions"


def verdicts(folder: Path) -> list[Path]:
    return [*(folder / "cache").rglob("verdict-*.json")]


WRONG = (
    r"this pack's split of the model gives a different result with ComfyUI \S+, which is \d\.\de-0[1-4] off under "
    r"(ulysses|ring|pipefusion) .+, where 1e-05 is allowed"
)


def test_a_class_with_a_changed_head_is_derived_again(tmp_path: Path) -> None:
    """The changed head mixes tokens, so it is no head any more. Until the class is derived, plans that can run it unsharded."""
    with copied(tmp_path, FILE, *EDITS["its head"], **PATIENT | {"PARALLEL_DEADLINES": DEADLINES}) as server:
        stock = saved_latent(server, server.queue(plain(), timeout=600).check())
        told = []
        for plan in ({"devices": "cpu:2", "cfg": 2}, PLANS[0], PLANS[2]):
            run, _ = assert_equal_run(server, spread(plain(), **plan), stock, timeout=PATIENCE)
            told.append([text.text for text in run.texts])
        assert any(re.search(f"WAN21_T2V runs unsharded for now: {WRONG}", text) for text in told[0])
        assert any("New model: worked out how to split the model" in text for text in told[1])
        assert len(FOUND.findall(server.log)) == 1
        assert "which needs the whole picture at once" in said(server, spread(plain(), **PLANS[1]))


def test_a_class_with_one_more_attention_in_its_blocks_is_derived_again(tmp_path: Path) -> None:
    """The workers would refuse these blocks under the written declaration."""
    with copied(tmp_path, FILE, *EDITS["one more attention"], **PATIENT | {"PARALLEL_DEADLINES": DEADLINES}) as server:
        stock = saved_latent(server, server.queue(plain(), timeout=600).check())
        for plan in PLANS:
            run = server.queue(spread(plain(), **plan), timeout=PATIENCE).check()
            assert relative_error(saved_latent(server, run), stock) <= TOLERANCE, plan
        assert len(FOUND.findall(server.log)) == 1
        whole = server.queue(spread(plain(), "cpu:1"), timeout=600).check()
        assert relative_error(saved_latent(server, whole), stock) <= TOLERANCE
        why = (
            "gives a different result on several devices, or none, because the model's WanAttentionBlock calls attention more "
            "than"
        )
        assert any(why in text.text for text in whole.texts)


@pytest.mark.parametrize("edit", ["a block", "its attention call"])
def test_a_changed_class_that_cannot_be_derived_is_refused_with_the_error(edit: str, tmp_path: Path) -> None:
    """The refusal comes before a worker reads a weight; ComfyUI's own loader still works."""
    with copied(tmp_path, FILE, *EDITS[edit], **PATIENT) as server:
        server.queue(plain(), timeout=600).check()
        for strict in (True, False):
            run, log = queue_logged(server, spread(plain(), **PLANS[0], strict=strict), timeout=600)
            assert run.error is not None
            figure = rf"WAN21_T2V cannot be run under this plan, because {WRONG}, and its blocks of blocks do not all .+: use "
            assert re.search(figure, run.error.exception_message), run.error.exception_message
            assert "the workers loaded" not in log
        print(edit, run.error.exception_message)
        assert re.search(WRONG, said(server, spread(plain(), **PLANS[1])))
        if edit == "a block":  # this change has no effect on ComfyUI's own forward
            assert_whole_on_one(server)


def assert_whole_on_one(server: ComfyUI) -> None:
    """Check that one worker runs the class unsharded and says so: in the loop, step by step, and with skipped blocks."""
    skipping = insert_after_model(plain(), "SkipLayerGuidanceDiT", **SKIPPING)
    for graph, strict in ((plain(), True), (step_by_step(plain()), False), (skipping, False)):
        stock = saved_latent(server, server.queue(graph, timeout=600).check())
        run, log = queue_logged(server, spread(graph, "cpu:1", strict=strict), timeout=600)
        assert relative_error(saved_latent(server, run.check()), stock) <= TOLERANCE
        assert (ways(log) == ["loop"]) == strict
        assert any("WAN21_T2V runs unsharded on one device: with ComfyUI " in text.text for text in run.texts)


def test_an_equivalent_class_is_checked_once_and_gives_its_own_picture(tmp_path: Path) -> None:
    before, after = EDITS["a block"][0], "        x = x * 1.0  # as before\n        # cross-attention & ffn\n"
    with copied(tmp_path, FILE, before, after, **PATIENT) as server:
        told, counts = [], []
        for steps in (3, 4):
            stock = saved_latent(server, server.queue(plain(steps), timeout=600).check())
            run, _ = assert_equal_run(server, spread(plain(steps), **PLANS[0]), stock)
            told.append(any(EQUAL in text.text for text in run.texts))
            counts.append(len(verdicts(tmp_path)))
        assert told == [True, False]
        assert counts == [2, 2], "one verdict on the class's own call, and one on the graph's"


def test_a_tested_comfyui_needs_no_check(tmp_path: Path) -> None:
    with copied(tmp_path, "README.md", "ComfyUI", "ComfyUI", **PATIENT) as server:
        run, log = queue_logged(server, spread(plain(), **PLANS[0]), timeout=600)
        run.check()
        assert not any(CHECKING.search(text.text) or EQUAL in text.text for text in run.texts)
        assert EQUAL not in log and verdicts(tmp_path) == []


def test_patches_see_the_same_latent_after_the_blocks_as_on_one_rank(tmp_path: Path) -> None:
    """The last stage has the whole latent, in which this step's update has already changed the patches before the current one."""
    with copied(tmp_path, FILE, *READS_NEIGHBOURS, **PATIENT) as server:
        stock = saved_latent(server, server.queue(plain(), timeout=600).check())

        def latent(**plan: object) -> Tensor:
            run, log = queue_logged(server, spread(plain(), **plan), timeout=600)
            assert ways(log) == ["loop"]
            return saved_latent(server, run.check())

        assert relative_error(latent(devices="cpu:2", pipefusion=2, warmup_steps=99), stock) <= TOLERANCE
        patches = {"patches": 3, "warmup_steps": 1}
        alone = latent(devices="cpu", **patches)
        assert relative_error(alone, stock) > TOLERANCE
        assert torch.equal(latent(devices="cpu:2", pipefusion=2, **patches), alone)
        product = latent(devices="cpu:8", cfg=2, pipefusion=2, ring=2, **patches)
        assert relative_error(product, alone) <= TOLERANCE


def test_nan_that_only_pipefusion_gives_names_the_plan(tmp_path: Path) -> None:
    """The proof has no step with this timestep, so it does not find the error."""
    with copied(tmp_path, FILE, *UNPROVED, **PATIENT) as server:
        run, _ = queue_logged(server, spread(plain(), devices="cpu:3", pipefusion=3), timeout=600)
        assert run.error is not None
        assert re.fullmatch(
            r"Step 1 of 3: the model's output holds \d+ values of \d+ that are NaN or infinite, computed in float32, "
            "under pipefusion 3 and not under ring 3: PipeFusion does not work with this model and these inputs; set "
            r"pipefusion to 1, and report the workflow\.",
            run.error.exception_message.strip(),
        )
        stock = saved_latent(server, server.queue(plain(), timeout=600).check())
        _, log = assert_equal_run(server, spread(plain(), devices="cpu:3", pipefusion=1), stock)
        assert "starting 3 worker" not in log

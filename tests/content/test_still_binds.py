"""Uses of ComfyUI by the pack, read from both sources: all bind in this ComfyUI, and planted wrong uses are found."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from scripts.comfyui_uses import Use, uses_in
from scripts.still_binds import Tree, main, report, uses_of_pack
from tests.support.selection import thorough

FOLDER = Path(os.environ["COMFYUI_PATH"]).resolve()
LEAST = {"name": 750, "call": 185, "super": 10, "override": 40, "replaced": 60}
"""Numbers of uses by the pack for each kind, rounded down."""


@pytest.fixture(scope="module")
def uses() -> list[Use]:
    return uses_of_pack()


def faults(source: str, folder: Path = FOLDER) -> set[str]:
    """Return the faults of a source's uses that do not bind and are not optional."""
    return {fault for use in uses_in(source, "planted.py") if not use.optional and (fault := Tree(folder).fault(use))}


# A use that does not bind fails the quick run's test that reaches it.
@thorough
def test_every_use_of_the_pack_binds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["still_binds", str(FOLDER)])
    ended = main()
    page = capsys.readouterr().out
    assert ended == 0, page
    assert page.startswith("# What the pack uses of ComfyUI ") and "## Does not bind\n" not in page
    assert len(page.splitlines()) < 60, "it is one page"


def test_all_kinds_of_uses_are_found(uses: list[Use]) -> None:
    assert all(sum(use.kind == kind for use in uses) >= least for kind, least in LEAST.items())
    roots = "comfy comfy_api comfy_extras comfy_execution folder_paths node_helpers nodes server"
    assert {use.name.partition(".")[0] for use in uses} >= {*roots.split()}


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import comfy.gone", "has no gone"),
        ("from comfy.utils import gone", "has no gone"),
        ("import comfy.samplers\ncomfy.samplers.gone", "has no gone"),
        ("def late():\n    import comfy.samplers as other\n    return other.gone", "has no gone"),
        ("from importlib import import_module\nops = import_module('comfy.ops').gone", "has no gone"),
        ("import comfy.samplers\ngetattr(comfy.samplers, 'gone')", "has no gone"),
        ("import comfy.samplers\ncomfy.samplers.CFGGuider.gone", "has no gone"),
        ("from server import PromptServer\nPromptServer.instance.routes, PromptServer.gone", "has no gone"),
        ("import folder_paths\nfolder_paths.get_full_path('vae')", "needs filename"),
        ("import folder_paths\nfolder_paths.get_full_path('vae', 'a', 'b')", "takes 2 positional arguments, not 3"),
        ("import folder_paths\nfolder_paths.get_full_path('vae', name='a')", "takes no name"),
        ("from comfy.samplers import CFGGuider\nCFGGuider(1, 2)", "takes 1 positional arguments, not 2"),
        ("from comfy.model_patcher import ModelPatcher as P\nP.get_key_patches(1, 2, 3)", "takes 2 positional arguments, not 3"),
        (
            "import comfy.model_patcher\nclass Own(comfy.model_patcher.ModelPatcher):\n    def get_key_patches(self): ...",
            "gets filter_prefix, which the pack's method does not accept",
        ),
        (
            "from comfy.model_patcher import ModelPatcher\nclass Own(ModelPatcher):\n"
            "    def of(self):\n        super().get_key_patches(1, 2)",
            "takes 1 positional arguments, not 2",
        ),
        ("import comfy.samplers\ndef of(comfy):\n    return comfy.samplers.gone", ""),
        ("import comfy.utils\ncomfy = object()\ncomfy.utils.gone", ""),
        ("from . import nodes\nnodes.gone", ""),
        ("import folder_paths\nfolder_paths.get_full_path(*names)\nfolder_paths.get_full_path('vae', **names)", ""),
        ("import comfy.samplers\ncomfy.samplers.__file__", ""),
    ],
)  # fmt: skip
def test_a_use_that_does_not_bind_is_found_unless_it_is_of_another_object_or_unclear(source: str, fault: str) -> None:
    assert faults(source) == ({fault} if fault else set())


@pytest.mark.parametrize(
    "source",
    [
        "import comfy.samplers\nhasattr(comfy.samplers, 'gone') and comfy.samplers.gone.more()",
        "import comfy.samplers\ngetattr(comfy.samplers, 'gone', None)",
        "try:\n    from comfy.utils import gone\nexcept (ImportError, OSError):\n    pass",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from comfy.utils import gone",
        "NAMES = ('comfy.ldm.gone.Model',)",
    ],
)
def test_a_guarded_use_is_optional(source: str) -> None:
    uses = uses_in(source, "planted.py")
    missing = [use for use in uses if Tree(FOLDER).fault(use)]
    assert missing and all(use.optional for use in missing)


def edited(folder: Path, file: str, *edits: tuple[str, str]) -> Path:
    """Return a folder that has ComfyUI's files, one of them edited: pairs of a text and its replacement."""
    for path in (path for path in FOLDER.iterdir() if path.name != "comfy"):
        (folder / path.name).symlink_to(path)
    (folder / "comfy").mkdir()
    for path in (FOLDER / "comfy").iterdir():
        (folder / "comfy" / path.name).symlink_to(path)
    text = (FOLDER / "comfy" / file).read_text()
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    (folder / "comfy" / file).unlink()
    (folder / "comfy" / file).write_text(text)
    return folder


def test_a_changed_function_of_comfyui_is_found(uses: list[Use], tmp_path: Path) -> None:
    some = [use for use in uses if use.name.startswith("comfy.utils.")]
    assert len(some) > 20 and report(FOLDER, some)[1] == 0
    renamed = "def swap_scale_shift(", "def swapped("
    page, missing = report(edited(tmp_path, "utils.py", renamed, ("unpack_latents(", "unpack_latents(key, ")), some)
    assert missing >= 2
    required = page.partition("## Does not bind\n")[2].partition("\n## ")[0]
    for name, fault in (("swap_scale_shift", "has no swap_scale_shift"), ("unpack_latents", "needs latent_shapes")):
        (line,) = (line for line in required.splitlines() if line.startswith(f"| `comfy.utils.{name}` | {fault} | "))
        assert ".py" in line, "it says where the pack has it"


def test_a_function_that_no_tested_version_has_is_reported(tmp_path: Path) -> None:
    text = "## Differs from every tested version"
    page, missing = report(edited(tmp_path, "samplers.py", ("strength = 1.0", "strength = 0.5")), [])
    assert text in page and "`comfy.samplers.get_area_and_mult`" in page and not missing
    assert Tree(FOLDER).fault(Use("comfy.samplers.gone", "", "replaced")) == "has no gone"

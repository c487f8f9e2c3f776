"""Digests of ComfyUI's functions by their source: changes that count, changes that do not, and other packs' functions."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel_backend.models.comfyui.content.files import changed_since, file_digest, imported, other_file, own_files
from parallel_backend.models.comfyui.content.known import tables
from parallel_backend.models.comfyui.content.replaced_functions import REPLACED_FUNCTIONS, ReplacedFunction
from parallel_backend.models.comfyui.content.source_digests import FunctionWalk, SourceDigestCheck
from tests.support.comfyuis import NewInComfyUI, name
from tests.support.programs import recording  # imports ComfyUI

import comfy.samplers  # isort: skip
import comfy.lora  # isort: skip
import comfy.model_base  # isort: skip

FOLDER = Path(comfy.samplers.__file__).parents[1]
COPY = "comfy.samplers_copy"
CALLS = ReplacedFunction(COPY, "_calc_cond_batch", "guidance")

Edit = Callable[[str], str]
Copied = Callable[[Edit], SourceDigestCheck]

assert recording


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copied:
    """Return a function that imports ComfyUI's sampling file, edited, as a module of a folder of its own."""

    def make(edit: Edit) -> SourceDigestCheck:
        folder = tmp_path / f"{len([*tmp_path.iterdir()])}"
        file = folder / "comfy" / "samplers_copy.py"
        file.parent.mkdir(parents=True)
        text = Path(comfy.samplers.__file__).read_text()
        file.write_text(edit(text))
        spec = importlib.util.spec_from_file_location(COPY, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, COPY, module)
        spec.loader.exec_module(module)
        return SourceDigestCheck(folder, ())

    return make


def replaced(before: str, after: str) -> Edit:
    def edit(text: str) -> str:
        assert text.count(before) >= 1, before
        return text.replace(before, after)

    return edit


HELPER = "def add_area_dims(area, num_dims):"
"""A helper that `get_area_and_mult` calls, which `_calc_cond_batch` calls."""


def commented(text: str) -> str:
    lines = text.replace(HELPER, f'@torch.no_grad()\n{HELPER}\n    """Text."""').replace("@torch.no_grad()\n", "", 1)
    return "\n\n\n# moved down\n" + re.sub(r"(?m)^    area = None$", "    # what it is\n    area: object = None", lines)


CFG = "cfg_result = uncond_pred + (cond_pred - uncond_pred) * cond_scale"
"""Code of a function that `_calc_cond_batch` does not call."""


@pytest.mark.parametrize("edit", [commented, replaced(CFG, "cfg_result = cond_pred")], ids=["text", "other code"])
def test_comments_docstrings_annotations_positions_and_other_code_change_no_digest(copied: Copied, edit: Edit) -> None:
    plain = copied(str).digests(CALLS)
    assert plain == copied(edit).digests(CALLS)
    assert len(plain.functions) > 5 and all(plain.functions.values())


@pytest.mark.parametrize(
    ("edit", "function"),
    [
        (replaced("[2147483648]", "[2147483647]"), "add_area_dims"),
        (
            replaced("area.append(p.area)\n                cond", "area.append(None)\n                cond"),
            "_calc_cond_batch",
        ),
        (replaced("strength = 1.0", "strength = 0.5"), "get_area_and_mult"),
    ],
)
def test_an_edit_that_changes_results_changes_the_digest_and_is_named(
    copied: Copied, edit: Edit, function: str
) -> None:
    before, after = copied(str).digests(CALLS), copied(edit).digests(CALLS)
    assert before.digest != after.digest
    changed = {each for each, digest in after.functions.items() if before.functions[each] != digest}
    assert changed == {f"{COPY}.{function}"}


def test_a_constant_of_the_module_changes_the_digest_and_a_missing_function_reaches_no_functions(
    copied: Copied,
) -> None:
    used = replaced("* 1e-37)", "* _LEAST)")
    first, second = (
        copied(lambda text, n=n: used(text) + f"\n_LEAST = {n}\n").digests(CALLS) for n in ("1e-37", "1e-36")
    )  # type: ignore[misc]
    assert first.functions == second.functions and first.digest != second.digest
    assert copied(replaced("def _calc_cond_batch(", "def _calc_conds(")).digests(CALLS).functions == {}


def test_another_packs_function_two_calls_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    content = SourceDigestCheck(FOLDER)

    def foreign(*_: object) -> None: ...

    monkeypatch.setattr(comfy.samplers, "add_area_dims", foreign)
    (found,) = content.unknown(("guidance",))
    assert (str(found.replaced), found.function) == ("comfy.samplers._calc_cond_batch", "comfy.samplers.add_area_dims")
    assert not found.digest and found.reason == "which is another pack's"
    monkeypatch.undo()
    assert content.unknown(("guidance",)) == []


def test_every_replaced_function_of_a_tested_comfyui_is_known_by_file_and_by_syntax() -> None:
    kinds = {function.kind for function in REPLACED_FUNCTIONS}
    loaded = {
        name for name in {function.module for function in REPLACED_FUNCTIONS} if FunctionWalk(FOLDER).module(name)
    }
    assert {"comfy.samplers", "comfy.lora", "comfy.model_base"} <= loaded
    by_syntax = tuple(
        table.__class__(table.version, table.how, {}, table.replaced, table.functions) for table in tables()
    )
    for given in (tables(), by_syntax):
        assert given and all(table.replaced for table in given)
        unknown = [each for each in SourceDigestCheck(FOLDER, given).unknown(kinds) if each.replaced.module in loaded]
        if unknown and not any(name().startswith(table.version.partition("+")[0]) for table in tables()):
            text = ", ".join(each.function for each in unknown)
            warnings.warn(NewInComfyUI(f"ComfyUI {name()} has functions that no table has: {text}"), stacklevel=1)
            continue
        assert not unknown


def test_without_tables_everything_is_unknown_and_has_a_digest() -> None:
    unknown = SourceDigestCheck(FOLDER, ()).unknown(("guidance", "mask"))
    assert len(unknown) == sum(function.kind in ("guidance", "mask") for function in REPLACED_FUNCTIONS)
    assert all(each.digest for each in unknown)


def test_a_file_that_differs_on_another_machine_is_named(tmp_path: Path) -> None:
    (tmp_path / "comfy").mkdir()
    one, other = (tmp_path / "comfy" / f"{each}.py" for each in ("one", "other"))
    one.write_text("a = 1\n")
    other.write_text("b = 1\n")
    paths = ["comfy/one.py", "comfy/other.py"]
    told = own_files(str(tmp_path))
    assert other_file(paths, tmp_path, told) is None
    one.write_bytes(b"a = 1\r\n")
    assert other_file(paths, tmp_path, told) is None
    other.write_text("b = 2\n")
    assert other_file(paths, tmp_path, told) == "comfy/other.py"
    assert own_files(str(tmp_path)) == told, "they are those that this process began with"
    assert file_digest(tmp_path / "none.py") == ""


def test_a_file_that_changed_since_its_import_is_found(copied: Copied, tmp_path: Path) -> None:
    copied(str)
    folder, module = tmp_path / "0", sys.modules[COPY]
    ours = {"comfy/samplers_copy.py": module}
    assert changed_since(ours, folder, started=0) == [], "it is what was imported"
    file = Path(str(module.__file__))
    file.write_text(file.read_text().replace("strength = 1.0", "strength = 0.5"))
    assert changed_since(ours, folder) == [*ours]
    file.unlink()
    assert changed_since(ours, folder) == [*ours]


def test_the_modules_of_comfyui_are_found_by_their_files() -> None:
    found = imported(FOLDER)
    assert len(found) > 100
    assert found["comfy/samplers.py"] is comfy.samplers
    assert all((FOLDER / path).is_file() for path in found)
    assert os.path.samefile(FOLDER, os.environ["COMFYUI_PATH"])

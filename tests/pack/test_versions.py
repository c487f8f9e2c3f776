"""The supported versions of torch and diffusers are the same in every list, and other versions are refused in one sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from packaging.requirements import Requirement

from parallel_backend.errors import Refused
from parallel_backend.host.workers import versions
from parallel_backend.identity import code_digest
from parallel_backend.models.comfyui.content import files
from parallel_backend.models.diffusers import diffusers_family
from parallel_backend.models.families import FAMILIES
from parallel_backend.vae import AUTOENCODERS
from parallel_backend.wire.to_host import RankFacts

REPO = Path(__file__).parents[2]
FACTS = RankFacts("machine-a", "cuda:0", "2.11.0", "0.42.1", code_digest())


def test_the_ranges_are_those_of_the_requirements_and_of_the_readme() -> None:
    """test_published has that pyproject.toml lists the same requirements."""
    listed = re.search(r"^diffusers.*$", (REPO / "requirements.txt").read_text(), re.MULTILINE)
    assert listed
    allowed = Requirement(listed[0]).specifier
    (major, minor), (newest_major, newest_minor) = diffusers_family.OLDEST, diffusers_family.NEWEST
    assert {str(each) for each in allowed} == {f">={major}.{minor}", f"<{newest_major}.{newest_minor + 1}"}
    text = (REPO / "README.md").read_text()
    assert f"diffusers {diffusers_family.SUPPORTED} for CogVideoX and PixArt" in text
    assert f"torch {versions.dotted(versions.OLDEST_TORCH)} or newer" in text


def test_only_an_older_torch_is_refused_and_in_one_sentence() -> None:
    for found in ("2.6.0+cu126", "2.11.0", "2.12.0.dev20260101", "3.0.0"):
        versions.check_torch(found)
    for found in ("2.4.1", "2.5.1+cu124"):
        message = f"torch {found} is installed and the workers need 2.6 or newer: update ComfyUI's torch."
        with pytest.raises(Refused, match=f"^{re.escape(message)}$"):
            versions.check_torch(found)


def test_this_process_imports_nothing_that_an_older_torch_lacks() -> None:
    """ComfyUI therefore starts with an older torch, and can show the sentence."""
    code = (
        "import sys, parallel_backend.host, parallel_backend.doctor; sys.exit('torch.distributed.fsdp' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0


@pytest.mark.parametrize("found", ["0.35.0", "0.35.2", "0.42.1", "0.42.0.dev0"])
def test_versions_of_diffusers_in_the_range_are_accepted(see: Callable[[str], None], found: str) -> None:
    see(found)
    diffusers_family.check_diffusers()


@pytest.mark.parametrize("found", ["0.34.0", "0.43.0", "1.0", ""])
def test_another_version_of_diffusers_or_none_is_refused_in_one_sentence(
    see: Callable[[str], None], found: str
) -> None:
    see(found)
    message = f"{diffusers_family.NEEDED}, and {found or 'none'} is installed: run pip install -r requirements.txt in the pack's"
    with pytest.raises(Refused, match=f"^{re.escape(message)}"):
        diffusers_family.check_diffusers()


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that makes this process see another version of diffusers, or no packages at all."""

    def installed_is(found: str) -> None:
        if found:
            metadata = tmp_path / f"diffusers-{found}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: diffusers\nVersion: {found}\n")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])

    return installed_is


def facts(**changes: object) -> RankFacts:
    return msgspec.structs.replace(FACTS, **changes)


@pytest.mark.parametrize(
    ("change", "check", "said"),
    [
        ({"torch": "2.10.0"}, versions.check_members, "torch 2.10.0 and worker 0 on machine-a "),
        ({"code": "1234"}, versions.check_members, "the pack's code 1234 and worker 0 on machine-a "),
        (
            {"diffusers": "0.35.0"},
            versions.check_members_diffusers,
            "diffusers 0.35.0 and worker 0 on machine-a 0.42.1: install the same version",
        ),
    ],
)
def test_a_rank_that_differs_is_named_with_its_host(
    change: dict[str, str], check: Callable[[list[RankFacts]], None], said: str
) -> None:
    with pytest.raises(Refused, match=f"^{re.escape(f'worker 2 on machine-b has {said}')}"):
        check([FACTS, FACTS, facts(host="machine-b", **change)])


def test_ranks_with_an_unsupported_diffusers_are_refused_only_if_a_model_needs_it() -> None:
    versions.check_members([FACTS, facts(diffusers=""), facts(diffusers="0.43.0")])
    for found in ("0.34.0", ""):
        said = f"{diffusers_family.NEEDED}, and the workers on machine-a have {found or 'none'}: run pip install -r"
        with pytest.raises(Refused, match=f"^{re.escape(said)}"):
            versions.check_members_diffusers([facts(diffusers=found)] * 2)


def test_the_families_of_diffusers_are_those_that_the_sentence_names() -> None:
    kinds = {
        name for name, family in {**FAMILIES, **AUTOENCODERS}.items() if diffusers_family.of_diffusers(family.imports)
    }
    assert kinds == {"cogvideox", "cogvideox vae", "pixart"}
    assert "CogVideoX and PixArt" in diffusers_family.NEEDED


def test_workers_with_other_code_than_comfyui_are_refused() -> None:
    said = r"^the workers on machine-a run another version of this pack \(1234\) than ComfyUI"
    with pytest.raises(Refused, match=said):
        versions.check_members([facts(code="1234")] * 2)


@pytest.fixture
def comfyui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a ComfyUI of one file, which this process has imported."""
    file = tmp_path / "comfy" / "sampling.py"
    file.parent.mkdir()
    file.write_text("def step():\n    return 1\n")
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.46.0"\n')
    for name, path in (("comfyui_version", tmp_path / "comfyui_version.py"), ("comfy.sampling", file)):
        module = ModuleType(name)
        module.__file__ = str(path)
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
        monkeypatch.setitem(sys.modules, name, module)
    return tmp_path


def told_of(folder: Path) -> RankFacts:
    files.own_files.cache_clear()
    return facts(comfyui="0.46.0", comfyui_files=files.own_files(str(folder)))


def test_workers_with_another_comfyui_version_are_refused(comfyui: Path) -> None:
    versions.check_members([told_of(comfyui)] * 2)
    old = msgspec.structs.replace(told_of(comfyui), comfyui="0.45.0")
    message = (
        "the workers on machine-a have ComfyUI 0.45.0 and this one is 0.46.0: install the same version on all machines and "
        "start the workers again."
    )
    with pytest.raises(Refused, match=f"^{re.escape(message)}$"):
        versions.check_members([old, old])


def test_another_checkout_of_the_same_version_is_named_by_its_file(comfyui: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "comfy").mkdir(parents=True)
    (there / "comfy" / "sampling.py").write_text("def step():\n    return 2\n")
    other = msgspec.structs.replace(told_of(there), host="machine-b")
    said = r"^worker 1 on machine-b has another comfy/sampling\.py than this ComfyUI, though both are 0\.46\.0: install"
    with pytest.raises(Refused, match=said):
        versions.check_members([told_of(comfyui), other])


def test_a_comfyui_that_was_updated_while_it_runs_is_refused(comfyui: Path) -> None:
    (comfyui / "comfy" / "sampling.py").write_text("def step():\n    return 2\n")
    said = r"^ComfyUI's files have changed since it was started \(comfy/sampling\.py\): restart ComfyUI"
    with pytest.raises(Refused, match=said):
        versions.check_members([told_of(comfyui)])

"""Quantised files, and a checkpoint, of a class that nobody declared give the same derivation as the plain file."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from parallel_backend.derive.declaration_cache import key_of
from parallel_backend.derive.small import Small, small_of
from parallel_backend.models.comfyui.importing import import_comfyui
from tests.derive.files import FORMS, save_forms
from tests.support.tiny.comfyui import save_tiny


@functools.cache
def loaded(file: Path) -> Small:
    """Return the small model of a file; the plain file's is made once."""
    import_comfyui()
    return small_of(file, 4e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    save_tiny(folder, "causal_wan")
    save_forms(folder, "causal_wan")
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_the_small_model_of_each_form_equals_the_plain_files(form: str, folder: Path) -> None:
    """Both have the same cache key, so that a record of one is found for the other."""
    plain, small = (loaded(folder / f"causal_wan{end}") for end in (".safetensors", f"-{form}"))
    assert small.kind == plain.kind
    assert key_of(small.kind, small.described.unet_config, ()) == key_of(plain.kind, plain.described.unet_config, ())
    ours, theirs = (each.base.diffusion_model.state_dict() for each in (small, plain))
    assert [*ours] == [*theirs]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("kind", "configuration", "sources"),
    [
        ("B", {"dim": 8}, (("model.py", "1"),)),
        ("A", {"dim": 9}, (("model.py", "1"),)),
        ("A", {"dim": 8}, (("model.py", "2"),)),
        ("A", {"dim": 8}, (("model.py", "1"), ("layers.py", "1"))),
    ],
    ids=["class", "configuration", "source", "more sources"],
)
def test_a_cache_key_holds_for_one_class_configuration_and_source(
    kind: str, configuration: dict[str, int], sources: tuple[tuple[str, str], ...]
) -> None:
    """A declaration that was derived for one version of a class is never used for another."""
    key = key_of("A", {"dim": 8}, (("model.py", "1"),))
    assert key == key_of("A", {"dim": 8, "dtype": torch.float32}, (("model.py", "1"),))
    assert key != key_of(kind, configuration, sources)

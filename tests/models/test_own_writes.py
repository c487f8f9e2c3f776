"""Attributes that ComfyUI's own code writes into a diffusion model before a run are accepted, for every class of this ComfyUI;
another pack's are refused.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from parallel_backend.errors import Refused
from parallel_backend.models.comfyui.model_run import PATCHER, ModelRun, has_setter
from tests.support.nodes_module import nodes_module

# isort: split
import comfy.model_base
import comfy.model_patcher
import comfy.supported_models

CPU = torch.device("cpu")

OF_COMFYUI = """
class OfARun(BaseModel):
    def __init__(self, inside):
        torch.nn.Module.__init__(self)
        self._current_patcher = self.device = None
        self.diffusion_model = inside

    @property
    def current_patcher(self):
        return self._current_patcher

    @current_patcher.setter
    def current_patcher(self, patcher):
        self._current_patcher = patcher
        enabled = patcher is not None and len(patcher.hook_patches) == 0
        self.diffusion_model.patcher, self.diffusion_model.cache = patcher, None
        self.diffusion_model.enabled = self.diffusion_model[0].enabled = enabled
"""
"""A BaseModel with a setter for `current_patcher`, compiled as ComfyUI's code."""


def inside() -> nn.Module:
    """Return a diffusion model with the attribute `enabled`, and a submodule with the same attribute."""
    module = nn.Sequential(nn.Linear(2, 2, device="meta"))
    for each in module.modules():
        vars(each).update(enabled=False, cache=None, patcher=None)
    return module


def built(monkeypatch: pytest.MonkeyPatch, of: str = "comfy.model_base") -> tuple[Any, Any, Any]:
    """Return a model before its first run, its patcher, and the snapshot of its diffusion model.

    Args:
        of: the name of the module that defines the setter.
    """
    scope = {**vars(comfy.model_base), "__name__": of}
    exec(OF_COMFYUI, scope)
    model = scope["OfARun"](inside())
    snapshot = nodes_module("model.unchanged", monkeypatch).SkeletonSnapshot(model.diffusion_model)
    return model, comfy.model_patcher.ModelPatcher(model, CPU, CPU), snapshot


def refuse_changes(model: Any, snapshot: Any) -> None:
    snapshot.refuse_changes(snapshot.own_writes.of(model))


def test_writes_of_comfyuis_own_class_are_accepted_during_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, patcher, snapshot = built(monkeypatch)
    for _ in range(2):
        patcher.pre_run()
        assert model.diffusion_model[0].enabled
        refuse_changes(model, snapshot)
        refuse_changes(model, snapshot)
        patcher.cleanup()
        refuse_changes(model, snapshot)
    another = patcher.clone()
    another.hook_patches = {"a hook": {}}
    another.pre_run()
    assert not model.diffusion_model.enabled
    refuse_changes(model, snapshot)


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("", "enabled", False),
        ("", "enabled", 1),
        ("", "cache", "mine"),
        ("", "patcher", None),
        ("0", "enabled", False),
        ("0", "in_features", 3),
    ],
)
def test_writes_of_a_pack_are_refused(path: str, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, patcher, snapshot = built(monkeypatch)
    patcher.pre_run()
    setattr(model.diffusion_model.get_submodule(path), name, value)
    with pytest.raises(Refused, match=re.escape(".".join(filter(None, ("Changing diffusion_model", path, name))))):
        refuse_changes(model, snapshot)


@pytest.mark.parametrize("by", ["a callback", "a class"])
def test_writes_of_another_packs_callback_or_class_before_the_run_are_refused(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "a_pack", ModuleType("a_pack"))
    model, patcher, snapshot = built(monkeypatch, of="a_pack" if by == "a class" else "comfy.model_base")
    if by == "a callback":
        patcher.add_callback("on_pre_run", lambda running: setattr(running.model.diffusion_model, "enabled", False))
    patcher.pre_run()
    with pytest.raises(Refused, match=r"Changing diffusion_model\.enabled"):
        refuse_changes(model, snapshot)


def test_a_worker_begins_and_ends_a_run_as_comfyui_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = built(monkeypatch)
    inside = model.diffusion_model
    first = ModelRun(model, inside, CPU)
    assert inside.enabled and inside[0].enabled and inside.patcher.get_free_memory(CPU) > 0
    second = ModelRun(model, inside, CPU)
    del first
    assert inside.enabled and inside.patcher is model.current_patcher
    del second
    assert not inside.enabled and not inside[0].enabled and model.current_patcher is None


META = torch.device("meta")
CLASSES = {described.__name__: described for described in comfy.supported_models.models}
NO_DIFFUSION_MODEL: dict[str, Any] = {"disable_unet_model_creation": True, "in_channels": 4, "hidden_size": 3072}
"""A configuration for a BaseModel alone. Some classes look up entries that a file would give."""

OF_A_FILE = frozenset({"Stable_Zero123", "StableAudio", "StableAudio3"})
"""The classes that make parts of their BaseModel of a file's tensors. Their BaseModel has no setter."""


def base_of(name: str, **configuration: Any) -> Any:
    """Return ComfyUI's BaseModel of a class, on the meta device."""
    return CLASSES[name]({**configuration, **CLASSES[name].unet_config}).get_model({}, "", device=META)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_no_class_writes_a_refused_attribute_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI's ModelPatcher begins a run as before sampling, then a worker begins and ends a run."""
    snapshots, tried = nodes_module("model.unchanged", monkeypatch), set()
    for name in sorted(CLASSES.keys() - OF_A_FILE):
        model = base_of(name, **NO_DIFFUSION_MODEL)
        if has_setter(model):
            model = base_of(name)
        else:
            model.diffusion_model = nn.Linear(2, 2, device="meta")
        snapshot = snapshots.SkeletonSnapshot(model.diffusion_model)
        patcher = comfy.model_patcher.ModelPatcher(model, CPU, CPU)
        patcher.pre_run()
        snapshot.refuse_changes(snapshot.own_writes.of(model))
        patcher.cleanup()
        snapshot.refuse_changes(snapshot.own_writes.of(model))
        run = ModelRun(model, model.diffusion_model, CPU)
        assert (model.current_patcher is not None) == has_setter(model)
        del run
        assert model.current_patcher is None
        tried.add(type(model))
    bases = [kind for kind in vars(comfy.model_base).values() if inspect.isclass(kind)]
    with_setter = {kind for kind in bases if isinstance(inspect.getattr_static(kind, PATCHER, None), property)}
    assert with_setter <= tried, "a class that writes before a run was not tried"
    print(f"{len(tried)} classes, {len(with_setter)} of them with a setter")


def writes(file: Path) -> Iterator[str]:
    """Yield the assignments in a file to attributes of a diffusion model, outside of setters that ModelRun calls too."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    setters = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == PATCHER]
    known = {id(inside) for setter in setters for inside in ast.walk(setter)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and id(node) not in known:
            owner = ast.unparse(node.value)
            if owner == "diffusion_model" or owner.endswith(".diffusion_model"):
                yield f"{file.name}:{node.lineno}: {ast.unparse(node)}"


def test_only_known_setters_of_comfyui_write_into_a_diffusion_model() -> None:
    """Workers lack any other write of the code around sampling, which holds for all models and requests."""
    files = sorted((Path(os.environ["COMFYUI_PATH"]) / "comfy").glob("*.py"))
    assert [found for file in files for found in writes(file)] == []

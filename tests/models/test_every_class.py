"""Writes of ComfyUI itself into a diffusion model before a run are accepted, for every class of this ComfyUI."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallel_backend.models.comfyui.model_run import PATCHER, ModelRun, has_setter
from tests.support.comfy_oracle import comfy_on_path
from tests.support.nodes_module import nodes_module

comfy_on_path()

import comfy.model_base  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.supported_models  # noqa: E402

CPU, META = torch.device("cpu"), torch.device("meta")
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

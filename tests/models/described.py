"""ComfyUI's descriptions of models, without weights, and a rank's forward through ComfyUI's own code around the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.supported_models

from parallel_backend.comm.meter import Meter
from parallel_backend.declaration import Declaration
from parallel_backend.mesh import build_mesh
from parallel_backend.models.comfyui.model import ComfyForward, ComfyModel
from parallel_backend.models.comfyui.proof.rank import CPU, plan_for
from parallel_backend.models.comfyui.small import Case
from parallel_backend.models.family import Execution, Stage
from parallel_backend.weights.stores.store import BlockAccess


def described(kind: str) -> Any:
    """Return ComfyUI's description of a model class. No weights are made."""
    return getattr(comfy.supported_models, kind)({"disable_unet_model_creation": True, "hidden_size": 3072})


def comfy_forwards(case: Case, declaration: Declaration | None = None, patches: int = 1) -> Callable[[], ComfyForward]:
    """Return a function that begins a run on the only rank, with another declaration if one is given. Call it in `run_ranks`."""
    base = described(case.kind).get_model({}, "")
    base.diffusion_model = case.model
    plan = plan_for(case, patches=patches)
    (blocks,) = plan.stages
    model = ComfyModel(base, declaration or case.declaration, Stage(0, blocks, blocks))
    mesh = build_mesh(plan, CPU, Meter())
    return lambda: model.forward_on(Execution(mesh, plan, BlockAccess(), lambda: None))

"""ComfyUI's TorchCompileModel on a MODEL. The workers compile their blocks with the node's backend."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy.samplers
from comfy.patcher_extension import WrappersMP

OPTION = "torch_compile_kwargs"
"""The model option that holds the node's settings."""

KEY = "torch.compile"
"""Key of the wrapper that swaps in the compiled model. Here the model is the proxy without weights, which stays as it is."""

SOURCE = Path(comfy.samplers.__file__).parents[1] / "comfy_api" / "torch_helpers" / "torch_compile.py"
FACTORY = "apply_torch_compile_factory"

KNOWN = {"options", "mode", "fullgraph", "dynamic", "backend"}
"""The settings in the option. The workers themselves choose `dynamic` and `fullgraph`."""

GUARDS = "guard_filter_fn"
"""The node's own setting, which removes guards on transformer_options."""


def compiles(model_options: Mapping[str, Any]) -> bool:
    """Return True if ComfyUI's own function compiles the run's entire diffusion model."""
    settings = model_options.get(OPTION)
    wrappers = model_options.get("transformer_options", {}).get("wrappers", {})
    functions = wrappers.get(WrappersMP.APPLY_MODEL, {}).get(KEY, [])
    if settings is None or len(functions) != 1 or set(settings) != KNOWN:
        return False
    (wrapper,) = functions
    module = sys.modules.get(getattr(wrapper, "__module__", ""))
    own = getattr(module, "__file__", None) == str(SOURCE) and wrapper.__qualname__.startswith(f"{FACTORY}.")
    compiled = inspect.getclosurevars(wrapper).nonlocals.get("compiled_module_dict", {}) if own else {}
    plain = (
        isinstance(settings["backend"], str) and settings["mode"] is None and set(settings["options"] or ()) <= {GUARDS}
    )
    return set(compiled) == {"diffusion_model"} and plain


def compiler_of(model_options: Mapping[str, Any]) -> str:
    """Return the backend that workers compile the blocks with; empty for none."""
    return str(model_options[OPTION]["backend"]) if compiles(model_options) else ""

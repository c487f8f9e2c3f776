"""Build a MODEL from a checkpoint's header: ComfyUI's model class on the meta device, with the weights in the workers."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import comfy.model_management
import comfy.utils
import msgspec
import torch
from comfy.cli_args import PerformanceFeature, args
from torch import Tensor

from ...parallel_backend.declaration import Declaration
from ...parallel_backend.diffusion import ModelSpec
from ...parallel_backend.errors import PlanRefused, Refused
from ...parallel_backend.host import Backend
from ...parallel_backend.models.comfyui.file_values import file_values, named_values
from ...parallel_backend.models.families import FAMILIES, family_of
from ...parallel_backend.models.family import Family
from ...parallel_backend.plan import ModelLimits, ParallelPlan, check
from ...parallel_backend.weights.files.checkpoint import Checkpoint, read_header
from ...parallel_backend.weights.files.digest import file_digest
from ...parallel_backend.weights.files.keymap import tensor_sizes
from ...parallel_backend.weights.layers.packing import packed_starts, quantised_matrices, resident_bytes
from ..memory.loaded_models import Shares
from .dtypes import dtype_name
from .features.adapter_requests import loads_dynamically
from .features.lora import AdapterReader
from .patcher import ParallelModelPatcher
from .proofs import proofs
from .proxy import DiffusionProxy
from .remote_model import RemoteModel
from .skeletons import SKELETONS
from .undeclared import ANY, Undeclared, may_be_derived

FAST = "fp8_e4m3fn_fast"

WEIGHT_DTYPES = MappingProxyType(
    {
        "default": None,
        "fp8_e4m3fn": torch.float8_e4m3fn,
        FAST: torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }
)
"""The choices of Load Diffusion Model's `weight_dtype`, as torch dtypes; None lets ComfyUI choose."""


def load_model(
    backend: Backend,
    family_name: str,
    path: str,
    weight_dtype: str,
    plan: ParallelPlan,
    kinds: Collection[str] = (),
    other_tensors: Mapping[str, Tensor] = MappingProxyType({}),
) -> ParallelModelPatcher:
    """Return a MODEL for a file, of which only the header is read.

    Args:
        backend: the Backend whose workers load the weights.
        family_name: the family's key in `FAMILIES`.
        path: the model file.
        weight_dtype: a key of `WEIGHT_DTYPES`.
        plan: the requested plan.
        kinds: ComfyUI's class names of the family's models to accept; all if empty.
        other_tensors: the checkpoint's tensors outside its diffusion model, for ComfyUI's class to read (such as the mark
            of a v-prediction model, or embedders). Load Checkpoint passes them, Load Diffusion Model does not.

    Raises:
        Refused: the file is not of an accepted model, or the plan cannot work on this machine.
    """
    if weight_dtype not in WEIGHT_DTYPES:
        raise Refused(f"weight_dtype {weight_dtype!r} is unknown: use one of {', '.join(WEIGHT_DTYPES)}.")
    checkpoint = read_header(path)
    family = FAMILIES[family_name]
    part, config = family.inspect(checkpoint)
    if kinds and family.shape(config).name not in kinds:
        raise Refused(
            f"{part.path.name} is a {family.shape(config).name} model and this loader takes {', '.join(sorted(kinds))}: use "
            "Load Parallel Diffusion Model."
        )
    devices = _devices(backend, plan, family.shape(config).limits, ANY if may_be_derived(config) else None)
    backend.check_loadable(family.imports, devices)
    tensors = part.meta_tensors()
    with file_values(named_values(tensors, part.entries)):
        model_config = SKELETONS[family_name].describe(tensors, config)
    if model_config is None:
        raise Refused(f"{part.path.name} is not a model ComfyUI knows: choose another file.")
    device = comfy.model_management.get_torch_device()
    dtypes = list(model_config.supported_inference_dtypes)
    marked = model_config.quant_config is not None
    quantised = marked or any(entry.scale or entry.dtype is None for entry in part.entries.values())
    dtype = WEIGHT_DTYPES[weight_dtype] or comfy.model_management.unet_dtype(
        model_params=comfy.utils.calculate_parameters(tensors),
        supported_dtypes=dtypes,
        weight_dtype=None if quantised else comfy.utils.weight_dtype(tensors),
    )
    cast = comfy.model_management.unet_manual_cast(None if marked else dtype, device, dtypes)
    model_config.set_inference_dtype(dtype, cast)
    compute = dtype_name(cast or dtype)
    fast = weight_dtype == FAST or PerformanceFeature.Fp8MatrixMultiplication in args.fast
    spec = ModelSpec(
        family_name,
        str(path),
        *part.fingerprint(),
        dtype_name(dtype),
        file_digest(path),
        compute,
        fast and not marked,
        dynamic=loads_dynamically(device),
    )
    in_fp8 = spec.fast_fp8 and comfy.model_management.supports_fp8_compute(device)
    precision = Precision(dtype, cast or dtype, in_fp8)
    remote = remote_of(backend, family, config, part, spec, plan, devices, precision)
    full_config = replace(config, tensors={**config.tensors, **other_tensors}) if other_tensors else config
    model = SKELETONS[family_name].make(model_config, tensors, full_config)
    proofs().begin(config, model.diffusion_model)
    shares = Shares(remote, device, comfy.model_management.get_all_torch_devices())
    undeclared, parallelise = None, functools.partial(parallelised, precision)
    if may_be_derived(config):
        undeclared = Undeclared(remote, parallelise)
    model.diffusion_model = DiffusionProxy(model, remote, shares, parallelise, undeclared)
    patcher = ParallelModelPatcher(
        model, load_device=device, offload_device=comfy.model_management.unet_offload_device()
    )
    patcher.add_sampling_wrapper()
    backend.retain(model, spec)
    return patcher


@dataclass(frozen=True)
class Precision:
    """The dtype of the stored weights, the dtype of the computation, and True if matrix products are in fp8."""

    storage: torch.dtype
    compute: torch.dtype
    in_fp8: bool


def remote_of(
    backend: Backend,
    family: Family,
    config: Any,
    part: Checkpoint,
    spec: ModelSpec,
    plan: ParallelPlan,
    devices: tuple[str, ...],
    precision: Precision,
) -> RemoteModel:
    """Return the handle of a model in the workers."""
    dtype, names = precision.storage, family.comfyui_keys(config)
    reader = AdapterReader(tensor_sizes(names), packed_starts(part, family.keys(config), dtype, names))
    quantised = quantised_matrices(part, dtype, precision.compute.itemsize, precision.in_fp8)
    return RemoteModel(backend, family, config, spec, plan, devices, resident_bytes(part, dtype), quantised, reader)


def parallelised(precision: Precision, unsharded: RemoteModel, declaration: Declaration, compiled: bool) -> RemoteModel:
    """Return an unsharded model, parallelised by a declaration that was derived for its class.

    Args:
        precision: the model's dtypes.
        unsharded: the model.
        declaration: the derived declaration.
        compiled: True if the workers may compile the blocks when the plan says so.

    Raises:
        Refused: the plan cannot work.
    """
    backend, plan = unsharded.backend, unsharded.requested_plan
    if not compiled:
        plan = msgspec.structs.replace(plan, compile="off")
    spec = msgspec.structs.replace(unsharded.spec, family="comfyui", derived=declaration)
    family = family_of(spec)
    part, config = family.inspect(read_header(spec.path))
    devices = _devices(backend, plan, family.shape(config).limits)
    return remote_of(backend, family, config, part, spec, plan, devices, precision)


def _devices(
    backend: Backend, plan: ParallelPlan, limits: ModelLimits, later: ModelLimits | None = None
) -> tuple[str, ...]:
    """Return the plan's devices if they fit the model's limits, or else the limits `later` that a derivation may give."""
    placed_on_devices, gpus = backend.placed_on_devices(plan), torch.cuda.device_count()
    try:
        return check(placed_on_devices, gpus, limits)
    except PlanRefused:
        if later is None:
            raise
        return check(placed_on_devices, gpus, later)


def judge_model(path: str) -> Any:
    """Return ComfyUI's configuration of the model that a file's header describes.

    Raises:
        Refused: Load Parallel Diffusion Model would refuse the file with any plan.
    """
    _, config = FAMILIES["comfyui"].inspect(read_header(path))
    return config.described

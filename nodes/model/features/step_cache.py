"""ComfyUI's step caches on a MODEL, EasyCache and LazyCache. The workers' loop skips the same calls as ComfyUI."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import comfy.samplers
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ....parallel_backend.diffusion import CacheSettings
from ..conditioning import NotSupported

KEY = "easycache"
"""The transformer option that holds the state of either node."""

SOURCE = Path(comfy.samplers.__file__).parents[1] / "comfy_extras" / "nodes_easycache.py"


@dataclass(frozen=True)
class StepCacheNode:
    """One step cache node of ComfyUI's.

    Attributes:
        name: the node's name.
        key: the key of all its wrappers.
        wrappers: ComfyUI's functions that the node adds as wrappers, by the kind of wrapper.
    """

    name: str
    key: str
    wrappers: Mapping[str, str]


HOLDERS = MappingProxyType(
    {
        "EasyCacheHolder": StepCacheNode(
            "EasyCache",
            "easycache",
            {
                WrappersMP.OUTER_SAMPLE: "easycache_sample_wrapper",
                WrappersMP.CALC_COND_BATCH: "easycache_calc_cond_batch_wrapper",
                WrappersMP.DIFFUSION_MODEL: "easycache_forward_wrapper",
            },
        ),
        "LazyCacheHolder": StepCacheNode(
            "LazyCache",
            "lazycache",
            {
                WrappersMP.OUTER_SAMPLE: "easycache_sample_wrapper",
                WrappersMP.PREDICT_NOISE: "lazycache_predict_noise_wrapper",
            },
        ),
    }
)
"""ComfyUI's step caches, by the class of their state."""


def known_wrappers(transformer_options: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return the kind and key of each wrapper of a step cache; empty unless all wrappers of one node are there."""
    holder = transformer_options.get(KEY)
    if holder is None:
        return frozenset()
    module, node = sys.modules.get(type(holder).__module__), HOLDERS.get(type(holder).__name__)
    if node is None or getattr(module, "__file__", None) != str(SOURCE):
        return frozenset()
    wrappers = transformer_options.get("wrappers", {})
    if all(wrappers.get(kind, {}).get(node.key) == [vars(module)[name]] for kind, name in node.wrappers.items()):
        return frozenset((kind, node.key) for kind in node.wrappers)
    return frozenset()


def cache_of(transformer_options: Mapping[str, Any], latent: Tensor, model: Any) -> CacheSettings | None:
    """Return a run's step cache; None if it has none. The caller has checked the cache's wrappers.

    Args:
        transformer_options: the run's transformer options.
        latent: `[batch, channels, ...]`.
        model: ComfyUI's diffusion model.

    Raises:
        NotSupported: the workers would not skip the same calls as ComfyUI.
    """
    holder = transformer_options.get(KEY)
    if holder is None:
        return None
    easy = holder.name == "EasyCache"
    if holder.verbose:
        raise NotSupported(f"{holder.name} with verbose, which logs every call")
    if easy and not runs_wrappers(model):
        raise NotSupported(f"EasyCache with ComfyUI's {type(model).__name__}, which does not run it")
    if latent.shape[1] > holder.output_channels or (easy and latent.shape[1] != holder.output_channels):
        raise NotSupported(f"{holder.name} with latents of {latent.shape[1]} channels")
    return CacheSettings(
        kind=holder.name,
        threshold=float(holder.reuse_threshold),
        start=float(holder.start_t),
        end=float(holder.end_t),
        stride=holder.subsample_factor,
    )


def report_skipped(transformer_options: Mapping[str, Any], skipped: int) -> None:
    """Store the number of calls that the workers skipped, for ComfyUI's own report of the run."""
    if (holder := transformer_options.get(KEY)) is not None:
        holder.total_steps_skipped = skipped


def runs_wrappers(model: Any) -> bool:
    """Return True if a diffusion model's own forward runs the DIFFUSION_MODEL wrappers. Some of ComfyUI's models do not."""
    return "DIFFUSION_MODEL" in type(model).forward.__code__.co_names

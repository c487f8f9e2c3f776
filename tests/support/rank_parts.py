"""Parts of a worker's rank, for tests of single parts: a communicator, callbacks without effect, and the merging of adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch import nn

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.models.comfyui.features.lora import merging_dtype, rounded
from parallel_backend.weights.adapters.lora import Adapter
from parallel_backend.weights.adapters.merging import Keep, Merging, Patching
from parallel_backend.weights.files.keymap import KeyMap
from parallel_backend.weights.loading.reading import Neighbours, Watch
from parallel_backend.weights.stores.store import WeightStore

CPU = torch.device("cpu")

LORA = Adapter("lora", {"up": "u", "down": "d"}, strength=0.7, alpha=4.0)
"""A LoRA whose matrices are the tensors `u` and `d`."""


def everyone(name: str, meter: Meter | None = None) -> Communicator:
    """Return a communicator of all ranks, or of this process alone outside of `run_ranks`."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return Communicator(name, group, CPU, False, meter or Meter())


def neighbours() -> Neighbours:
    """Return all ranks, as ranks on one machine."""
    ranks = everyone("loading")
    return Neighbours(ranks, (0,) * ranks.size)


def watch(read: Callable[[int], object] = lambda nbytes: None) -> Watch:
    """Return callbacks for loading. Nobody cancels the loading, and `read` is called with the bytes of each chunk."""
    return Watch(lambda: False, lambda *_: None, read)  # type: ignore[arg-type]


def keep(room: bool = True) -> Keep:
    """Return limits on the memory for original weights: there is room for all of them, or for none."""
    return Keep(fits=lambda _: room, all_true=lambda fits: fits)


def patching(
    module: nn.Module,
    store: WeightStore,
    keys: KeyMap,
    reload: Callable[[Collection[str]], None] = lambda names: None,
    dtype: torch.dtype = torch.float32,
) -> Patching:
    """Return the adapters of a module whose weights ComfyUI holds in a dtype. There is room for all original weights."""
    merging = Merging(dtype, (), functools.partial(merging_dtype, False), rounded)
    return Patching(module, store, CPU, keys, reload, keep(), merging)

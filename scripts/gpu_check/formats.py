"""Checks of stored formats that are expanded or multiplied directly: GGUF's kernels and ComfyUI's quantised layers."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.models.comfyui.fast_fp8 import FastLinear, multiply_in_fp8
from parallel_backend.models.comfyui.quantisation import open_checkpoint
from parallel_backend.models.comfyui.quantised_layers import pieces_of, quantise_layers
from parallel_backend.weights.files.checkpoint import read_header
from parallel_backend.weights.formats import BLOCK_TYPES, PLAIN
from parallel_backend.weights.layers.cast import pack
from parallel_backend.weights.layers.expansion import Expansion, expand_by
from parallel_backend.weights.layers.packing import shape_parameters
from parallel_backend.weights.layers.quantised import compute_in
from parallel_backend.weights.loading.loader import WeightSource, load_weights
from parallel_backend.weights.loading.reading import Neighbours, Watch
from parallel_backend.weights.stores.replicated import ReplicatedStore
from tests.support.tiny.formats import random_blocks

from .bench import TYPE, Bench

LAYER = "blocks.0"
SOME_ROWS = 7
"""Number of rows below the one that a kernel was compiled with."""

QUANTISED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "scaled fp8": ("float8_e4m3fn", {"scale": "recalculate"}),
    "NVFP4": ("nvfp4", {}),
    "MXFP8": ("mxfp8", {}),
    "INT8": ("int8_tensorwise", {"per_channel": True}),
}
"""The quantised formats by name: ComfyUI's name of the format, and the arguments of its quantiser."""


class Described:
    """A model config as ComfyUI makes it for a quantised file."""

    quant_config: ClassVar = {"mixed_ops": True}


class Formats(Bench):
    """Checks of a layer in each format, of the size of a large model's layer."""

    def run(self) -> None:
        """Check GGUF's types, then the formats that are multiplied as they are stored."""
        self.rows, self.columns, self.tokens_given = (12288, 3072, 1031) if self.cuda else (96, 512, 7)
        self.each(self.blocks, self.fast, *(functools.partial(self.quantised, name) for name in QUANTISED))

    def blocks(self) -> None:
        """Compare each of GGUF's types, expanded by one kernel, with the gguf package's values."""
        expansion = Expansion(fused=self.cuda)
        if not self.cuda:
            self.say("GGUF's kernels", None, "not run: without a GPU, eager operations expand the weights")
        for kind, storage in BLOCK_TYPES.items():
            stored = random_blocks(kind, self.rows // 4, self.columns, seed=1)
            layer = nn.Linear(self.columns, len(stored), bias=False, device="meta")
            pack(layer, storage, scaled=False)
            layer.weight = nn.Parameter(torch.from_numpy(stored).to(self.device), requires_grad=False)
            expand_by(layer, expansion)
            expansion.make_kernels(layer, TYPE, self.device)
            for reason in expansion.warnings():
                self.say("GGUF's kernels", False, reason)
            expected = torch.from_numpy(gguf.dequantize(stored, kind)).to(TYPE)
            rows = layer.weight.data
            found = expansion.expand(storage, rows, TYPE).cpu()
            some = expansion.expand(storage, rows[:SOME_ROWS], TYPE).cpu()
            good = torch.equal(found, expected) and torch.equal(some, expected[:SOME_ROWS])
            ours = self.milliseconds(functools.partial(expansion.expand, storage, rows, TYPE))
            eager = self.milliseconds(functools.partial(storage.expand, rows, TYPE))
            text = f"{found.nbytes / ours / 1e6:.0f} GB/s of {TYPE}, eager operations {found.nbytes / eager / 1e6:.0f} GB/s"
            self.say(f"GGUF {kind.name}", good, text)

    def fast(self) -> None:
        """Compare plain fp8, multiplied in fp8, with ComfyUI's operations, if they would do so on this card."""
        import comfy.model_management
        import comfy.ops

        weight = self.weight().to(torch.float8_e4m3fn)
        layer = nn.Linear(self.columns, self.rows, bias=False, device="meta")
        pack(layer, PLAIN[torch.float8_e4m3fn], scaled=False)
        layer.weight = nn.Parameter(weight.view(torch.uint8), requires_grad=False)
        model = nn.Sequential(layer)
        multiply_in_fp8(model, self.device)
        operations = comfy.ops.pick_operations(
            torch.float8_e4m3fn, self.computing, load_device=self.device, fp8_optimizations=True
        )
        own = operations.Linear(self.columns, self.rows, bias=False, dtype=torch.float8_e4m3fn, device="meta")
        own.weight = nn.Parameter(weight, requires_grad=False)
        native = isinstance(model[0], FastLinear)
        assert native == comfy.model_management.supports_fp8_compute(self.device)
        self.beside(
            "fp8 fast",
            model,
            own,
            "multiplied in fp8" if native else "expanded, because this device has no fp8 products",
        )

    def quantised(self, name: str) -> None:
        """Compare a layer of one of ComfyUI's formats, loaded by the pack and by ComfyUI from the same file."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "layer.safetensors")
            save_file(stored(self.weight().float().cpu(), *QUANTISED[name]), path)
            self.beside(name, self.loaded(path), self.stock(path), "")

    def beside(self, name: str, ours: nn.Module, own: nn.Module, text: str) -> None:
        """Report a layer: equality of its bits with ComfyUI's own layer, and the times of both."""
        x = torch.randn(1, self.tokens_given, self.columns, generator=torch.Generator().manual_seed(3))
        x = x.to(self.device, self.computing)
        equal = torch.equal(ours(x.clone()), own(x.clone()))
        times = [self.milliseconds(functools.partial(layer, x)) for layer in (ours, own)]
        text = f"{times[0]:.2f} ms, ComfyUI's own {times[1]:.2f}" + (text and f"; {text}")
        self.say(f"a layer, {name}", equal, text)

    @property
    def computing(self) -> torch.dtype:
        """Return the dtype that layers compute in."""
        return getattr(torch, self.computes_in)  # type: ignore[no-any-return]

    def weight(self) -> Tensor:
        """Return a layer's values."""
        return self.values(f"{LAYER}.weight", torch.Size((self.rows, self.columns)))

    def loaded(self, path: Path) -> nn.Module:
        """Return the layer as a rank loads it."""
        opened = open_checkpoint(read_header(path))
        part, marks = opened.under(opened.tensors)
        model = nn.Module()
        model.blocks = nn.ModuleList([nn.Linear(self.columns, self.rows, bias=False, device="meta")])
        made_of = quantise_layers(model, part, marks, Described())
        part, keys = replace(part, entries=made_of), pieces_of(made_of)
        compute_in(model, self.computing)
        shape_parameters(model, part, keys, self.computing)
        store = ReplicatedStore(model)
        store.materialise(self.device)
        alone = Communicator("loading", None, torch.device("cpu"), False, Meter())
        watch = Watch(lambda: False, lambda *_: None, lambda _: None)
        load_weights(model, store, WeightSource(part, keys, self.computing), Neighbours(alone, (0,)), watch)
        return model.get_submodule(LAYER)

    def stock(self, path: Path) -> nn.Module:
        """Return the same layer from ComfyUI's loader."""
        import comfy.ops

        tensors = {name.removeprefix(f"{LAYER}."): tensor for name, tensor in load_file(path).items()}
        operations = comfy.ops.pick_operations(None, self.computing, load_device=self.device, model_config=Described())
        layer: nn.Module = operations.Linear(self.columns, self.rows, bias=False, device="cpu")
        layer.load_state_dict(tensors)
        return layer.to(self.device)


def stored(weight: Tensor, form: str, kept: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a layer's tensors in a format, by ComfyUI's own quantiser."""
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    mark = torch.tensor(list(json.dumps({"format": form}).encode()), dtype=torch.uint8)
    made = QuantizedTensor.from_float(weight, QUANT_ALGOS[form]["comfy_tensor_layout"], **kept)
    return {**made.state_dict(f"{LAYER}.weight"), f"{LAYER}.comfy_quant": mark}

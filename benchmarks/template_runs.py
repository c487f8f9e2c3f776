"""Runs one of ComfyUI's workflow templates up to the workers, with ComfyUI's own nodes and this pack's own decisions.

Models are headers without weights (`template_models`), so that the real loader finds them. Every node that makes a MODEL,
GUIDER, SAMPLER, SIGMAS, CONDITIONING or LATENT is executed, and the MODEL's own wrapper decides as always. Stand-ins replace
encoders, VAEs and pictures, and answer for the workers, with zeros.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.template_graphs import LOADERS, Node, Output
from benchmarks.template_models import SIZES
from benchmarks.template_standins import FRAMES, PICTURE, PRESENT, StandIns
from scripts.comfyui import REPO
from tests.support.sparse_files import write_sparse

PACK = "comfyui_parallel"
WAY = frozenset(
    {"MODEL", "GUIDER", "SAMPLER", "SIGMAS", "CONDITIONING", "LATENT", "NOISE", "LATENT_OPERATION", "TIMESTEPS_RANGE"}
)
"""Types that only nodes between loader and sampler give. Stand-ins replace nodes with other outputs."""

PLAIN = frozenset({"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "*", "COMFY_MATCHTYPE_V3"})
"""Types of values that a node may compute for other nodes."""

SMALL = {"width": PICTURE[1], "height": PICTURE[0], "batch_size": 1} | dict.fromkeys(
    ("length", "frames_number", "num_frames", "video_frames"), FRAMES
)
"""Values for inputs of these names that keep everything small."""

LORAS = ("LoraLoader", "LoraLoaderModelOnly")
CONTROL = ("fixed", "randomize", "increment", "decrement")
REFUSALS = ("Refused", "PlanRefused")


class Stock(Exception):
    """An exception for a model whose loader stays stock. Its samplers are not run."""


class NotTried(Exception):
    """An exception for a required node that cannot run here."""


@dataclass
class Verdict:
    """The result of a template.

    Attributes:
        loops: number of sampler nodes that ran in the workers' loop.
        slower: reasons why other sampler nodes did not.
        refused: refusals.
        untried: reasons why a node between loader and sampler could not run here.
        assumed: nodes that could not run here and passed on their inputs.
    """

    loops: int = 0
    slower: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)


class Host:
    """ComfyUI's nodes and this pack in this process, and MODELs made of headers."""

    def __init__(self, comfyui: Path, folder: Path) -> None:
        """Import ComfyUI and the pack. Headers are written to `folder`."""
        self._folder = folder
        self._models: dict[str, Any] = {}
        sys.path.append(str(comfyui))
        importlib.import_module("comfy.cli_args").args.cpu = True
        self._nodes = _module("nodes", comfyui / "nodes.py")
        importlib.import_module("server").PromptServer(asyncio.new_event_loop())
        asyncio.run(self._nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
        self.execution = importlib.import_module("execution")
        _module(PACK, REPO / "__init__.py")
        importlib.import_module(f"{PACK}.nodes").register_samplers()
        self.heard: list[str] = []
        _answer_for_the_workers(self)

    def kind(self, name: str) -> Any:
        """Return a node's class.

        Raises:
            NotTried: ComfyUI has no such node.
        """
        if name not in self._nodes.NODE_CLASS_MAPPINGS:
            raise NotTried(f"ComfyUI has no node {name}")
        return self._nodes.NODE_CLASS_MAPPINGS[name]

    def model(self, model: str) -> Any:
        """Return the MODEL that Load Parallel Diffusion Model gives for a file.

        A refusal raises the pack's own exception class.
        """
        if model not in self._models:
            build = importlib.import_module(f"{PACK}.nodes.model.build")
            plan = importlib.import_module(f"{PACK}.parallel_backend.plan").ParallelPlan(devices="cpu:2")
            runtime = importlib.import_module(f"{PACK}.nodes.runtime")
            path = write_header(self._folder, model)
            self._models[model] = build.load_model(runtime.backend(), "comfyui", str(path), "default", plan)
        return self._models[model].clone()


def write_header(folder: Path, model: str) -> Path:
    """Write a safetensors file without data, as a sparse file, for a model of `SIZES`."""
    import comfy.supported_models

    meta_model = importlib.import_module(f"{PACK}.parallel_backend.models.comfyui.meta_model")
    kind = getattr(comfy.supported_models, model.partition(" ")[0])
    base = meta_model.make_model(kind(dict(SIZES[model])), {}, torch.bfloat16)
    kind_of_wan = SIZES[model].get("model_type")  # some classes differ only in this
    described = {"config": json.dumps({"transformer": {"model_type": kind_of_wan}})} if kind_of_wan else {}
    return write_sparse(folder / f"{model}.safetensors", base.diffusion_model.state_dict(), described)


class Trial:
    """One template. `models` has the loaders' models by node; None if the stock loader stays."""

    def __init__(self, host: Host, graph: Mapping[str, Node], models: Mapping[str, str | None]) -> None:
        self._host = host
        self._graph = graph
        self._models = models
        self._by_model: dict[str, tuple[StandIns, dict[str, tuple[Any, ...]]]] = {}
        self.verdict = Verdict()

    def run(self) -> Verdict:
        """Execute all nodes that sample, and return the result."""
        for name, node in self._graph.items():
            if "LATENT" in node.types and {"MODEL", "GUIDER"} & {kind for _, kind in node.slots}:
                try:
                    self._for(name)
                    self._outputs(name)
                except Stock:
                    continue
                except NotTried as reason:
                    self.verdict.untried.append(str(reason))
                except Exception as error:
                    if type(error).__name__ not in REFUSALS:
                        raise
                    self.verdict.refused.append(str(error))
        return self.verdict

    def _for(self, sampler: str) -> None:
        """Prepare stand-ins for the model that a node samples.

        Raises:
            Stock: the model's loader stays stock.
        """
        model = self._models[self._loader(sampler)]
        if model is None:
            raise Stock
        if model not in self._by_model:
            self._by_model[model] = StandIns(self._host.model(model), model.partition(" ")[0]), {}
        self._stand_ins, self._done = self._by_model[model]

    def _loader(self, name: str) -> str:
        """Return the loader of a node's MODEL.

        Raises:
            NotTried: the node has no model.
        """
        if name in self._models:
            return name
        node = self._graph[name]
        types = dict(node.slots)
        for slot, source in node.links.items():
            if types[slot] in ("MODEL", "GUIDER") or (types[slot] in PLAIN and "MODEL" in node.types):
                with contextlib.suppress(NotTried):
                    return self._loader(source.node)
        raise NotTried(f"{node.kind} has no model")

    def _outputs(self, name: str) -> tuple[Any, ...]:
        if name not in self._done:
            self._done[name] = self._execute(name, self._graph[name])
        return self._done[name]

    def _execute(self, name: str, node: Node) -> tuple[Any, ...]:
        if node.kind in LOADERS:
            model = self._models[name]
            if model is None:
                raise Stock
            given = {"MODEL": self._host.model(model)}
            return tuple(given.get(kind, self._stand_ins.of(kind)) for kind in node.types)
        if node.kind in LORAS:
            return tuple(self._value(node.links.get(kind.lower()), kind) for kind in node.types)
        if not WAY & set(node.types) and not PLAIN & set(node.types):
            sound = "audio" in f"{node.kind} {node.widgets}".lower()  # a loader or a VAE's file of sound
            return tuple(self._stand_ins.of("AUDIO_VAE" if sound and kind == "VAE" else kind) for kind in node.types)
        try:
            return self._call(name, node)
        except (Stock, NotTried):
            raise
        except Exception as error:
            if not WAY & set(node.types):
                return tuple(self._stand_ins.of(kind) for kind in node.types)
            if type(error).__name__ in REFUSALS:
                raise
            samples = {"MODEL", "GUIDER"} & {kind for _, kind in node.slots} and "LATENT" in node.types
            if samples or "MODEL" in node.types:
                raise NotTried(f"{node.kind}: {type(error).__name__}: {str(error)[:200]}") from error
            self.verdict.assumed.append(node.kind)
            return self._passed_on(node)

    def _passed_on(self, node: Node) -> tuple[Any, ...]:
        """Return a node's inputs as its outputs, by type, because the node could not run."""
        found = []
        taken: list[str] = []
        for kind in node.types:
            slots = [slot for slot, its in node.slots if its == kind and slot in node.links]
            left = [slot for slot in slots if slot not in taken] or slots
            taken += left[:1]
            found.append(self._value(node.links[left[0]], kind) if left else self._stand_ins.of(kind))
        return tuple(found)

    def _call(self, name: str, node: Node) -> tuple[Any, ...]:
        kind = self._host.kind(node.kind)
        description = kind.INPUT_TYPES()
        widgets = dict(_widgets(description, node))
        inputs: dict[str, Any] = dict(widgets)
        types = dict(node.slots)
        for slot, source in node.links.items():
            value = self._value(source, types[slot], computed=True)
            if value is not None or slot not in widgets:
                inputs[slot] = value
        for slot, value in SMALL.items():
            if isinstance(inputs.get(slot), int):
                inputs[slot] = value
        for slot, value in _defaults(description):
            inputs.setdefault(slot, value)
        execution = self._host.execution
        data, _, hidden = execution.get_input_data(inputs, kind, name)
        heard = len(self._host.heard)
        results, *_ = asyncio.run(execution.get_output_data("census", name, kind(), data, v3_data=hidden))
        for what in self._host.heard[heard:]:
            if what == LOOP:
                self.verdict.loops += 1
            else:
                self.verdict.slower.append(what)
        return tuple(each[0] for each in results)

    def _value(self, source: Output | None, kind: str, computed: bool = False) -> Any:
        """Return the value of a link; None for a number that is not known here."""
        if source is None or source.node not in self._graph:
            return None if computed else self._stand_ins.of(kind)
        try:
            return self._outputs(source.node)[source.index]
        except (Stock, NotTried):
            if kind in WAY:
                raise
            return None if kind in PLAIN else self._stand_ins.of(kind)


LOOP = "in the workers' loop"


def _answer_for_the_workers(host: Host) -> None:
    """Answer the pack's requests to the workers with zeros, and note the kind of each."""
    remote = importlib.import_module(f"{PACK}.nodes.model.remote_model").RemoteModel
    reader = importlib.import_module(f"{PACK}.nodes.model.features.lora").AdapterReader
    controls = importlib.import_module(f"{PACK}.nodes.model.features.controlnet")
    plan = SimpleNamespace(
        describe=lambda **_: "census",
        pipefusion=1,
        uses_pipefusion=False,
        patches=1,
        cfg=1,
        world_size=2,
        attention="auto",
        exchange="exact",
    )

    def sample(self: Any, tensors: Mapping[str, Tensor], *_: Any, **__: Any) -> Any:
        host.heard.append(LOOP)
        message = SimpleNamespace(uncompiled=(), skipped=())
        return SimpleNamespace(
            message=message, tensors={"result": torch.zeros_like(tensors["x"]), "sigmas": tensors["sigmas"]}
        )

    def forward(self: Any, calls: Any, *given: Any, **_: Any) -> list[Tensor]:
        control = given[-1] if isinstance(given[-1], dict) else None
        if control is not None and not self.family.control_blocks(self.config):
            controls.residuals_of({PRESENT: [torch.zeros(1)]}, {}, (1, 1, 1))
        return [torch.zeros_like(call.tensors["x"]) for call in calls]

    class Heard(logging.Handler):
        """A handler that takes the reason out of the log's line."""

        def emit(self, record: logging.LogRecord) -> None:
            if "slower path" in str(record.msg) and isinstance(record.args, tuple):
                host.heard.append(str(record.args[-1]))

    reader.add = lambda self, tensor, tensors: "without values"
    remote.plan = lambda *_, **__: plan
    remote.free_memory = lambda *_, **__: 0
    remote.sample, remote.forward = sample, forward
    log = logging.getLogger(f"{PACK}.nodes.model.run")
    log.setLevel(logging.INFO)
    log.addHandler(Heard())
    log.propagate = False


def _module(name: str, path: Path) -> Any:
    """Import a file under a name, as ComfyUI does with packs."""
    within = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=within)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _widgets(description: Mapping[str, Any], node: Node) -> Iterator[tuple[str, Any]]:
    """Yield the values of a node's widgets, by the inputs' names."""
    if isinstance(node.widgets, dict):
        yield from node.widgets.items()
        return
    values = [value for value in node.widgets if value not in CONTROL]
    names = list(node.named)
    dynamic = any(kind.startswith("COMFY_DYNAMICCOMBO") for _, kind in node.slots)
    if len(names) < len(values) and not dynamic:  # older front ends save no names
        names = [
            name
            for section in ("required", "optional")
            for name, (kind, *options) in description.get(section, {}).items()
            if not isinstance(kind, str) or kind in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
        ]
    yield from zip(names, values, strict=False)


def _defaults(description: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, (kind, *options) in description.get("required", {}).items():
        given = options[0] if options else {}
        if "default" in given:
            yield name, given["default"]
        elif not isinstance(kind, str) and kind:
            yield name, kind[0]

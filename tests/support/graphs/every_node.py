"""Builds a small graph with each kind of node of ComfyUI that takes part in sampling, from the node's description."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from tests.support.graphs.comfyui import TOKENS, graph_of
from tests.support.graphs.flux import Graph, insert_after, ksampler_graph, node
from tests.support.server import NARROW_DEV

SEED = 5200
SIZES = {"width": 64, "height": 64, "length": 5, "batch_size": 1, "steps": 2}
"""Values for inputs of these names that keep the graphs small."""

FILES = {
    "lora_name": "tiny-adapter.safetensors",
    "control_net_name": "tiny-xlabs.safetensors",
    "hypernetwork_name": "tiny.pt",
}
"""Files for inputs of these names. The files must exist."""

NODES: Graph = {
    "other": node("LoadConditioning", conditioning="cond-1.safetensors"),
    "reference": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
    "sigmas": node("BasicScheduler", model=["model", 0], scheduler="simple", steps=2, denoise=1.0),
    "falling": node("ManualSigmas", sigmas="0.9, 0.6, 0.1"),
    "image": node("EmptyImage", width=64, height=64, batch_size=1, color=0x4080C0),
    "mask": node("SolidMask", value=0.5, width=64, height=64),
    "vae": node("VAELoader", vae_name="taef1"),
    "control": node("ControlNetLoader", control_net_name=FILES["control_net_name"]),
    "operation": node("LatentOperationSharpen", sharpen_radius=3, sigma=1.0, alpha=0.1),
    "range": node("ConditioningTimestepsRange", start_percent=0.0, end_percent=0.6),
    "camera": node("WanCameraEmbedding", camera_pose="Static", width=64, height=64, length=5),
    "objects": node("PackObjects"),
}
"""Nodes that feed the other inputs. ComfyUI runs only those that are needed."""

OBJECTS = (
    "CLIP", "CLIP_VISION_OUTPUT", "STYLE_MODEL", "GLIGEN", "MODEL_PATCH", "LORA_MODEL", "AUDIO_ENCODER_OUTPUT", "AUDIO",
    "TRACKS"
)  # fmt: skip
"""Types of the outputs of the node PackObjects, in order."""

SOURCES: dict[str, list[Any]] = {
    "MODEL": ["model", 0],
    "LATENT": ["reference", 0],
    "SIGMAS": ["sigmas", 0],
    "IMAGE": ["image", 0],
    "MASK": ["mask", 0],
    "VAE": ["vae", 0],
    "CONTROL_NET": ["control", 0],
    "LATENT_OPERATION": ["operation", 0],
    "TIMESTEPS_RANGE": ["range", 1],
    "WAN_CAMERA_EMBEDDING": ["camera", 0],
    **{kind: ["objects", index] for index, kind in enumerate(OBJECTS)},
}
"""Links for the inputs of each type."""


BLANK = {"INT": 0, "FLOAT": 0.0, "STRING": "", "BOOLEAN": False}
"""Values of inputs that have no default."""


def plays_a_part(info: Mapping[str, Any]) -> bool:
    """Return True if a node takes and gives a MODEL or a CONDITIONING, or gives a GUIDER, a SAMPLER or SIGMAS."""
    given, taken = set(types_given(info)), {kind for _, kind, _, _ in inputs_of(info)}
    return bool(given & {"GUIDER", "SAMPLER", "SIGMAS"} or given & taken & {"MODEL", "CONDITIONING"})


def types_given(info: Mapping[str, Any]) -> list[str]:
    """Return the types of a node's outputs."""
    return [kind if isinstance(kind, str) else "COMBO" for kind in info["output"]]


def inputs_of(info: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any], bool]]:
    """Yield each input's name, type, options, and true if it is required."""
    for section in ("required", "optional"):
        for name, (kind, *options) in info["input"].get(section, {}).items():
            given = dict(options[0]) if options else {}
            if not isinstance(kind, str):
                kind, given = "COMBO", given | {"options": kind}
            yield name, kind, given, section == "required"


def base_graph() -> Graph:
    """Return a graph with two steps of a model with guidance and cfg, on a latent of 8 x 8."""
    return copy.deepcopy(NODES) | ksampler_graph(NARROW_DEV, width=64, height=64, steps=2, cfg=2.0, seed=SEED)


def family_graph(name: str, latent: dict[str, Any], vae: str, beside: bool) -> Graph:
    """Return the graph of `base_graph` with one of tests/support/tiny's models and a VAE's file.

    Args:
        latent: the node that makes an empty latent. A second such node is used for inputs that take an earlier result.
        beside: True if the prompts hold more than text, in files.
    """
    own = {
        "other": node("LoadConditioning", conditioning=f"{name}-negative.safetensors"),
        "vae": node("VAELoader", vae_name=vae),
        "latent": latent,
        "reference": latent,
    }
    graph = copy.deepcopy(NODES) | graph_of(name, steps=2, cfg=2.0, seed=SEED) | copy.deepcopy(own)
    for side in TOKENS if beside else ():
        graph = insert_after(graph, side, "PackPrompt", "conditioning", file=f"{name}-beside-{side}.safetensors")
    return graph


def with_custom_sampler(graph: Graph) -> Graph:
    """Return the graph with SamplerCustomAdvanced in place of KSampler."""
    sides = {side: [side, 0] for side in ("positive", "negative")}
    links = {name: [name, 0] for name in ("noise", "guider", "sigmas")}
    return graph | {
        "noise": node("RandomNoise", noise_seed=SEED),
        "guider": node("CFGGuider", model=["model", 0], **sides, cfg=2.0),
        "select": node("KSamplerSelect", sampler_name="euler"),
        "sampler": node("SamplerCustomAdvanced", **links, sampler=["select", 0], latent_image=["latent", 0]),
    }  # fmt: skip


def graph_with(name: str, info: Mapping[str, Any], given: Mapping[str, Any], base: Graph | None = None) -> Graph:
    """Return a graph with one node of the given kind where it takes part in the run.

    Args:
        name: the node's class.
        info: the node's description from ComfyUI's server.
        given: values of inputs that the description does not determine; None leaves an input out.
        base: a graph of a model that the node is made for; the LATENT that the node gives is then sampled. Default:
            `base_graph`.

    Raises:
        ValueError: an input is of an unknown type and is not in `given`.
    """
    outputs = types_given(info)
    custom = {"GUIDER", "SAMPLER", "SIGMAS"} & set(outputs)
    graph = copy.deepcopy(base) if base else base_graph()
    if custom:
        graph = with_custom_sampler(graph)
    inputs: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    value: Any
    for input_name, kind, options, needed in inputs_of(info):
        if input_name in given:
            continue
        if kind == "CONDITIONING":
            value = _prompt(input_name, inputs)
        elif kind in SOURCES:
            value = SOURCES[kind]
        elif input_name in SIZES and kind == "INT":
            size: int = SIZES[input_name]
            value = min(max(size, options.get("min", 0)), options.get("max", size))
        elif input_name in FILES:
            value = FILES[input_name]
        elif "default" in options:
            value = options["default"]
        elif kind == "COMBO" and options["options"]:
            value = options["options"][0]
        elif kind in BLANK:
            value = options.get("min", BLANK[kind])
        elif not needed or any(key.startswith(f"{input_name}.") for key in given):
            continue
        else:
            raise ValueError(f"its input {input_name} is of the type {kind}")
        inputs[input_name] = value
    _put_in_place(graph, outputs)
    if base and "LATENT" in outputs:
        graph["sampler"]["inputs"]["latent_image"] = ["tried", outputs.index("LATENT")]
    graph["tried"] = node(name, **inputs)
    return graph


def _prompt(input_name: str, inputs: Mapping[str, Any]) -> list[Any]:
    """Return a link to the positive prompt first, then to another prompt."""
    if "negative" in input_name and ["negative", 0] not in inputs.values():
        return ["negative", 0]
    return ["other", 0] if ["positive", 0] in inputs.values() else ["positive", 0]


def _put_in_place(graph: Graph, outputs: list[str]) -> None:
    """Connect the outputs of the node "tried" to the nodes that take them."""
    if "MODEL" in outputs:
        for other in graph.values():
            for input_name, value in other["inputs"].items():
                if value == ["model", 0]:
                    other["inputs"][input_name] = ["tried", outputs.index("MODEL")]
    takers = {"GUIDER": ("sampler", "guider"), "SAMPLER": ("sampler", "sampler"), "SIGMAS": ("sampler", "sigmas")}
    for kind, (taker, input_name) in takers.items():
        if kind in outputs:
            graph[taker]["inputs"][input_name] = ["tried", outputs.index(kind)]
    conditionings = [index for index, kind in enumerate(outputs) if kind == "CONDITIONING"]
    for side, index in zip(("positive", "negative"), conditionings, strict=False):
        graph["sampler"]["inputs"][side] = ["tried", index]

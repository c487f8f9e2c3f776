"""The refused graphs of this folder's tests by list, with their sentences; the page's tests show them on the screen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.refusals import files as refused_files
from tests.refusals import inputs as refused_inputs
from tests.refusals import networks as refused_networks
from tests.refusals import unsharded as refused_unsharded
from tests.refusals.kinds import Refusals, exactly, literally
from tests.refusals.no_pictures import NO_PICTURE
from tests.refusals.of_comfyui import FROM_WITHIN, PICTURE
from tests.refusals.of_flux import (
    CONDITIONINGS,
    FILES,
    LATENTS,
    LAYER,
    LORAS,
    MODEL_NODES,
    PERTURBED,
    PLANS,
    WAY_OUT,
    from_file,
    on_one_worker,
    small,
)
from tests.support.graphs.comfyui import graph_of, save_families, spread
from tests.support.graphs.flux import Graph, controlled, insert_after, insert_after_model, node, parallel
from tests.support.tiny.controlnet import save_xlabs

NO_MASK = "attention_mask in the conditioning cannot be used with a parallel FluxSchnell MODEL: .*, or use Load Diffusion Model.$"
TAKEN = "Flux, Flux2, FluxInpaint, FluxSchnell"
CANNOT = f"cannot be done with a parallel MODEL: {WAY_OUT}"


def plans(server: ComfyUI) -> Refusals:
    """Yield plans that the pack or the workers refuse. plan/test_requested_plans has the sentences of all."""
    for case in ("a GPU that is not there", "more workers than heads", "flash on the CPU", "sage on the CPU"):
        plan, sentence = PLANS[case]
        yield parallel(small(), **plan), exactly(sentence)
    said = (
        "cfg 2 needs a negative prompt, and this sampling has none for this model (at cfg 1, or with BasicGuider, it is "
        "unused): set cfg to 0 or 1 in the plan, or the sampler's cfg above 1."
    )
    yield parallel(small(cfg=1.0), "cpu:2", cfg=2), exactly(said)


def conditionings(server: ComfyUI) -> Refusals:
    for number, (write, sentence) in enumerate(CONDITIONINGS.values()):
        write(server.input_dir / f"refused-{number}.safetensors")
        yield on_one_worker(small(positive=f"refused-{number}")), exactly(sentence)
    graph = on_one_worker(small())
    said = (
        "a reference latent has the shape [1, 4, 8, 8] and FluxSchnell takes 16 channels: encode the reference picture with "
        "the VAE that belongs to this model."
    )
    yield insert_after(graph, "positive", "ReferenceLatent", "conditioning", latent=["latent", 0]), exactly(said)
    for strength in (0.5, 0.0):
        yield styled(on_one_worker(small()), strength), NO_MASK


def styled(graph: Graph, strength: float) -> Graph:
    """Return the graph with FLUX Redux' tokens on its prompt, whose attention they get with this strength."""
    style = {"style_model": ["objects", 2], "clip_vision_output": ["objects", 1], "strength": strength}
    graph = graph | {"objects": node("PackObjects")}
    return insert_after(graph, "positive", "StyleModelApply", "conditioning", strength_type="attn_bias", **style)


def latents(server: ComfyUI) -> Refusals:
    for number, (tensor, sentence) in enumerate(LATENTS.values()):
        yield from_file(server, tensor, f"refused-{number}"), exactly(sentence)


def nodes(server: ComfyUI) -> Refusals:
    tensors = {f"{LAYER}.lora_down.weight": torch.ones(2, 5 * 512), f"{LAYER}.lora_up.weight": torch.ones(512, 2)}
    lora = "refused-node.safetensors"
    save_file(tensors, server.base_dir / "models" / "loras" / lora)
    for kind, (inputs, what) in MODEL_NODES.items():
        chosen = {name: lora if name == "lora_name" else value for name, value in inputs.items()}
        said = f"{literally(what)} cannot be .*{literally(WAY_OUT)}$"
        yield insert_after_model(on_one_worker(small()), kind, **chosen), said
    merging = {"ModelMergeSimple": {"ratio": 0.5}, "ModelMergeSubtract": {"multiplier": 1.0}, "ModelMergeAdd": {}}
    for kind, settings in merging.items():
        for side, other in (("model1", "model2"), ("model2", "model1")):
            graph = insert_after(on_one_worker(small()), "model", kind, side, **{other: ["stock", 0]}, **settings)
            graph["stock"] = node("UNETLoader", unet_name="tiny-dev.safetensors", weight_dtype="default")
            yield graph, exactly(f"Merging models {CANNOT}")
    graph = on_one_worker(small())
    loaded = {name: graph[name] for name in ("model", "plan")}
    saving = node("ModelSave", model=["model", 0], filename_prefix="refused")
    yield loaded | {"save": saving}, exactly(f"Saving the model {CANNOT}")
    inputs = {"filename_prefix": "refused", "rank": 2, "lora_type": "standard", "bias_diff": False}
    saving = node("LoraSave", model_diff=["model", 0], **inputs)
    yield loaded | {"save": saving}, exactly(f"Reading the weights {CANNOT}")
    hooks = {"hook": node("CreateHookLora", lora_name=lora, strength_model=1.0, strength_clip=1.0)}
    hooked = {"strength": 1.0, "set_cond_area": "default", "hooks": ["hook", 0]}
    graph = insert_after(on_one_worker(small()) | hooks, "positive", "ConditioningSetProperties", "cond_NEW", **hooked)
    yield graph, exactly(f"Applying LoRA hooks {CANNOT}")
    yield styled(parallel(small(), "cpu:1", sampler=True), 0.5), NO_MASK
    changes: tuple[tuple[str, dict[str, str], str], ...] = (
        ("PackModel", {"kind": "positions that are no numbers"}, "changed positions that are not numbers"),
        ("PackOverride", {}, r"an attention override .*\.overridden."),
    )
    for kind, change, what in changes:
        said = f"{what} cannot be applied to a parallel MODEL: {literally(WAY_OUT)}$"
        yield insert_after_model(on_one_worker(small()), kind, **change), said
    stock = small()
    stock["sampler"]["class_type"] = "ParallelSampler"
    said = "Parallel Sampler takes a MODEL from a Load Parallel node: use such a loader, or the stock KSampler here."
    yield stock, exactly(said)


def loras(server: ComfyUI) -> Refusals:
    for number, (shapes, sentence) in enumerate(LORAS.values()):
        name = f"refused-{number}.safetensors"
        tensors = {key: torch.ones(shape) for key, shape in shapes.items()}
        save_file(tensors, server.base_dir / "models" / "loras" / name)
        graph = on_one_worker(small())
        yield (
            insert_after_model(graph, "LoraLoaderModelOnly", lora_name=name, strength_model=1.0),
            exactly(sentence),
        )


def files(server: ComfyUI) -> Refusals:
    for number, (content, sentence) in enumerate(FILES.values()):
        name = f"refused-{number}"
        (server.base_dir / "models" / "diffusion_models" / f"{name}.safetensors").write_bytes(content)
        yield on_one_worker(small(name)), f"{name}\\.safetensors .*{literally(sentence)}"


def families(server: ComfyUI) -> Refusals:
    save_families(server, "flux2", "wan")
    graph = spread(graph_of("wan"))
    graph["model"]["class_type"] = "LoadParallelFlux"
    said = f"wan.safetensors is a WAN21_T2V model and this loader takes {TAKEN}: use Load Parallel Diffusion Model."
    yield graph, exactly(said)
    # an incomplete file of a class without a declaration
    incomplete = server.base_dir / "models" / "diffusion_models" / "refused-undeclared.safetensors"
    save_file({"genre_embedder.weight": torch.zeros(1, 1)}, incomplete)
    graph = graph_of("wan")
    graph["model"]["inputs"]["unet_name"] = incomplete.name
    yield spread(graph), r".*choose a complete ACEStep file\."
    graph = graph_of("wan")
    graph["positive"]["inputs"]["conditioning"] = "flux2-positive.safetensors"
    yield spread(graph), r".*takes \[batch, tokens, 4096\]"
    for kind, (name, inputs, said) in FROM_WITHIN.items():
        graph = insert_after_model(graph_of(name) | PICTURE, kind, **inputs)
        yield spread(graph, strict=False), exactly(f"{said} a parallel MODEL: {WAY_OUT}")


def in_the_middle(server: ComfyUI) -> Refusals:
    """Yield graphs that are refused only during the computation.

    The reasons are a ControlNet's output, guidance that replaces blocks, and a model's numbers.
    """
    save_xlabs(server.base_dir / "models" / "controlnet" / "refused.safetensors", heads=1)
    control = controlled(
        parallel(small())
        | {
            "net": node("ControlNetLoader", control_net_name="refused.safetensors"),
            "image": node("EmptyImage", width=64, height=64, batch_size=1, color=0),
        }
    )
    said = "the ControlNet gives tensors of [2, 16, 128] and this job takes [2, 16, 512]: use a ControlNet that was made for "
    yield control, exactly(f"{said}this model.")
    strict = node("ParallelSampler", **control["sampler"]["inputs"])
    said = "Parallel Sampler does not support ControlNet: choose a graph without it, or KSampler, which is slower (one model "
    yield control | {"sampler": strict}, exactly(f"{said}call at a time).")
    for sampler, said in (
        (False, f"replaced attention or blocks .*{literally(WAY_OUT)}$"),
        (True, "Parallel Sampler does not support the model option sampler_"),
    ):
        perturbed = parallel(small(), sampler=sampler)
        yield insert_after_model(perturbed, "PerturbedAttentionGuidance", **PERTURBED), said
    for graph, said in NO_PICTURE.values():
        yield parallel(graph), said


LISTS: dict[str, Callable[[ComfyUI], Refusals]] = {
    each.__name__.replace("_", " "): each
    for each in (
        plans,
        conditionings,
        latents,
        nodes,
        loras,
        files,
        families,
        in_the_middle,
        refused_files.stored,
        refused_files.marked,
        refused_files.of_diffusers,
        refused_files.vaes,
        refused_inputs.saved_prompts,
        refused_inputs.other_packs,
        refused_inputs.places_and_machines,
        refused_inputs.videos_and_pictures,
        refused_inputs.sound,
        refused_inputs.what_travels,
        refused_inputs.linked,
        refused_inputs.sizes,
        refused_inputs.computed,
        refused_networks.networks,
        refused_unsharded.whole,
    )
}

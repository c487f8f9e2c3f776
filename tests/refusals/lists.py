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
from tests.support.graphs.flux import Graph, controlled, insert_after, insert_after_model, node, parallel, unplanned
from tests.support.graphs.guidance import NAG, SKIPPING
from tests.support.graphs.vae import FILES as VAE_FILES
from tests.support.tiny.controlnet import save_xlabs
from tests.vae.comfy_vaes import NOISE_INSIDE, save_comfy_vae, save_image_vae


def plans(server: ComfyUI) -> Refusals:
    for plan, sentence in PLANS.values():
        yield parallel(small(), **plan), exactly(sentence)
    yield parallel(small(cfg=1.0), "cpu:2", cfg=2), "cfg 2 needs a negative prompt"
    said = "devices '99' asks for GPU 99, .* There is no Parallel Plan: devices are those of Settings > Parallel\\.$"
    yield unplanned(small(), devices="99"), said


def conditionings(server: ComfyUI) -> Refusals:
    for number, (write, sentence) in enumerate(CONDITIONINGS.values()):
        write(server.input_dir / f"refused-{number}.safetensors")
        yield on_one_worker(small(positive=f"refused-{number}")), exactly(sentence)


def latents(server: ComfyUI) -> Refusals:
    for number, (tensor, sentence) in enumerate(LATENTS.values()):
        yield from_file(server, tensor, f"refused-{number}"), exactly(sentence)
    graph = on_one_worker(small())
    yield insert_after(graph, "positive", "ReferenceLatent", "conditioning", latent=["latent", 0]), "a reference latent"


def nodes(server: ComfyUI) -> Refusals:
    tensors = {f"{LAYER}.lora_down.weight": torch.ones(2, 5 * 512), f"{LAYER}.lora_up.weight": torch.ones(512, 2)}
    lora = "refused-node.safetensors"
    save_file(tensors, server.base_dir / "models" / "loras" / lora)
    for kind, inputs, what in MODEL_NODES.values():
        chosen = {name: lora if name == "lora_name" else value for name, value in inputs.items()}
        said = f"{literally(what)} cannot be .*{literally(WAY_OUT)}$"
        yield insert_after_model(on_one_worker(small()), kind, **chosen), said
    merged = insert_after(on_one_worker(small()), "model", "ModelMergeSimple", "model1", model2=["model", 0], ratio=0.5)
    yield merged, "Merging models cannot be done"
    graph = on_one_worker(small())
    saving = {name: graph[name] for name in ("model", "plan")}
    yield saving | {"save": node("ModelSave", model=["model", 0], filename_prefix="refused")}, "Saving the model cannot"
    stock = small()
    stock["sampler"]["class_type"] = "ParallelSampler"
    yield stock, "Parallel Sampler takes a MODEL from a Load Parallel node"


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
    for kind, what in (
        ("Flux", "is a WAN21_T2V model"),
        ("CogVideoX", "has no CogVideoX"),
        ("PixArt", "has no PixArt"),
    ):
        graph = spread(graph_of("wan"))
        graph["model"]["class_type"] = f"LoadParallel{kind}"
        yield graph, f"wan.safetensors {what}"
    for kind, (name, inputs, said) in FROM_WITHIN.items():
        if kind not in MODEL_NODES:
            graph = insert_after_model(graph_of(name) | PICTURE, kind, **inputs)
            yield spread(graph, strict=False), literally(said)


def vaes(server: ComfyUI) -> Refusals:
    folder = server.base_dir / "models" / "vae"
    for number, (tensors, said) in enumerate(VAE_FILES.values()):
        save_file(tensors, folder / f"refused-{number}.safetensors")
        yield decoding(f"refused-{number}"), f".*{literally(said)}"
    save_comfy_vae(folder / "refused-noise.safetensors", "ltx095", **NOISE_INSIDE)
    yield decoding("refused-noise"), ".*holds an LTX-Video VAE of version 0\\.9\\.1, whose decoder adds random noise"
    save_image_vae(folder / "refused.safetensors", torch.float16)
    yield decoding("refused", "CogVideoParallelDecode"), "CogVideoX Parallel Decode was given an image VAE"
    stock = decoding("refused", "CogVideoParallelDecode")
    stock["vae"] = node("VAELoader", vae_name="taef1")
    yield stock, "CogVideoX Parallel Decode takes a VAE from Load Parallel VAE"
    saving = decoding("refused")
    saving["save"] = node("VAESave", vae=["vae", 0], filename_prefix="refused")
    yield saving, "Saving a parallel VAE cannot be done"


def decoding(vae: str, decoder: str = "VAEDecode") -> Graph:
    return {
        "plan": node("ParallelPlan", devices="cpu:1"),
        "vae": node("LoadParallelVAE", vae_name=f"{vae}.safetensors", frame_batches="comfyui", plan=["plan", 0]),
        "latent": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "pixels": node(decoder, samples=["latent", 0], vae=["vae", 0]),
        "save": node("PreviewImage", images=["pixels", 0]),
    }


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
    yield control, "the ControlNet gives tensors of "
    strict = node("ParallelSampler", **control["sampler"]["inputs"])
    yield control | {"sampler": strict}, "Parallel Sampler does not support ControlNet: "
    perturbed = insert_after_model(parallel(small()), "PerturbedAttentionGuidance", **PERTURBED)
    yield perturbed, "replaced attention or blocks "
    skipping = insert_after_model(parallel(small(), pipefusion=2), "SkipLayerGuidanceDiT", **SKIPPING)
    yield skipping, "the guidance skips 1 of the model's blocks and a PipeFusion stage of the plan has only 1"
    compared = insert_after_model(parallel(small(), cfg=2), "NAGuidance", **NAG)
    yield compared, "NAGuidance compares both prompts in every attention layer, but cfg 2 and data 1 would compute them"
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
        vaes,
        in_the_middle,
        refused_files.stored,
        refused_files.marked,
        refused_files.of_diffusers,
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

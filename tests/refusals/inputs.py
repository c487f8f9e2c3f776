"""Inputs that are refused in addition to those of of_flux: saved prompts, other packs, other machines, videos and sound."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save, save_file

from parallel_backend.wire.handshake import VARIABLE
from scripts.comfyui import ComfyUI
from tests.refusals.kinds import Refusals, exactly, literally
from tests.refusals.of_flux import LAYER, on_one_worker, small
from tests.refusals.wrong_sizes import wrong_sizes
from tests.support.graphs.comfyui import (
    LATENTS,
    TOKENS,
    graph_of,
    save_families,
    save_latent,
    spread,
    with_guides,
    with_tensors,
)
from tests.support.graphs.diffusers import family_graph, save_gguf
from tests.support.graphs.flux import Graph, insert_after, insert_after_model, node, parallel, unplanned
from tests.support.graphs.other_packs import changed, guided
from tests.support.graphs.prompts import WHOLE, round_trip
from tests.support.tiny import cogvideox as tiny_cogvideox
from tests.support.tiny import pixart as tiny_pixart
from tests.support.tiny.comfyui import TINY, save_tiny, save_unread
from tests.support.tiny.flux import flux_tensors, save_flux
from tests.support.tiny.models import draw


def saved_prompts(server: ComfyUI) -> Refusals:
    """Yield graphs that Save Conditioning and Load Conditioning refuse."""
    save_file(WHOLE, server.input_dir / "whole.safetensors")
    both = node("ConditioningCombine", conditioning_1=["load", 0], conditioning_2=["load", 0])
    said = "Save Conditioning writes one prompt and was given 2 combined ones: save each before combining them."
    yield round_trip("refused", both), exactly(said)
    area = node("ConditioningSetArea", conditioning=["load", 0], width=64, height=64, x=0, y=0, strength=1.0)
    said = (
        "Save Conditioning saves the text, pooled_output, attention_mask, guidance; this prompt also has area, "
        "set_area_to_bounds, strength: save it before the nodes that add those."
    )
    yield round_trip("refused", area), exactly(said)
    (server.input_dir / "a-file").write_text("in the way")
    for prefix, why in (("a" * 300, "File name too long"), ("a-file/below", "Not a directory")):
        said = f"could not be written to ComfyUI's input folder .*{why}.*: make room there or choose another name"
        yield round_trip(prefix), f"{prefix} {said}\\.$"
    whole = save(WHOLE)
    truncated = f"is truncated: it should have {len(whole)} bytes and has {len(whole) - 1}; download it again."
    for name, content, said in (
        ("empty", b"", "(0 bytes) is neither a safetensors nor a GGUF file: download it again, "),
        ("cut", whole[:-1], truncated),
        ("headless", b"\x08" + bytes(7) + b"no json!", "has a damaged header ("),
        (
            "a-model",
            save({"img_in.weight": torch.zeros(2)}),
            "has no tensor named cond: pick a file that Save Conditioning wrote.",
        ),
    ):
        (server.input_dir / f"{name}.safetensors").write_bytes(content)
        graph = round_trip("refused")
        graph["load"]["inputs"]["conditioning"] = f"{name}.safetensors"
        yield graph, f"{name}\\.safetensors {literally(said)}"


def other_packs(server: ComfyUI) -> Refusals:
    """Yield graphs with other packs' changes of a MODEL; tests/features/test_other_packs.py has those inside its modules."""
    for kind, said in (
        ("a patch with a function", "the function halve on .*img_in.weight cannot be applied to a parallel MODEL"),
        ("clones for other GPUs", "MultiGPU CFG Split cannot be used with a parallel MODEL: use Parallel Plan instead"),
    ):
        yield on_one_worker(changed(kind)), said
    for kind, name, value in (
        ("no number", "cfg", "nan"),
        ("without end", "cfg", "inf"),
        ("too strong", "cfg", "1e.38"),
        ("too strong elsewhere", "cfg2", "1e.38"),
    ):
        said = f"the {name} is {value}, which makes no picture: set it to a number such as 1"
        yield on_one_worker(guided(kind)), said
    save_file({f"{LAYER}.oft_blocks": torch.zeros(16, 32, 32), f"{LAYER}.dora_scale": torch.ones(512, 1)},
              server.base_dir / "models" / "loras" / "refused-dora.safetensors")  # fmt: skip
    graph = insert_after_model(on_one_worker(small()), "LoraLoaderModelOnly", lora_name="refused-dora.safetensors",
                               strength_model=1.0)  # fmt: skip
    yield graph, "DoRA on an OFT adapter cannot be applied to a parallel MODEL: "
    edm = {"sampling": "edm", "sigma_max": 120.0, "sigma_min": 0.002}
    graph = insert_after_model(small(sampler="cogvideox_ddim"), "ModelSamplingContinuousEDM", **edm)
    yield (
        graph,
        "The sampler 'cogvideox_ddim' cannot be used with the model sampling .*: choose another one, such as euler",
    )


def places_and_machines(server: ComfyUI) -> Refusals:
    """Yield graphs with plans that name unreachable machines, or that do not fit."""
    yield parallel(small(), "cpu:2", memory_limit=0.001), ".*memory_limit 0.001"
    yield parallel(small(), "tcp://nowhere"), "'tcp://nowhere' is no address: write tcp://HOST:PORT, such as"
    stranger = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=answer_strangely, args=(stranger,), daemon=True).start()
    elsewhere = parallel(small(), f"tcp://127.0.0.1:{stranger.getsockname()[1]}")
    secret = server.base_dir / server.env[VARIABLE]
    before = secret.read_bytes() if secret.exists() else None
    secret.unlink(missing_ok=True)
    yield elsewhere, "the secret of the workers on other machines cannot be read from "
    secret.touch(mode=0o600)
    secret.write_bytes(b"short")
    yield elsewhere, ".* holds 5 bytes and a secret has "
    secret.write_text(secrets.token_urlsafe(32))
    secret.chmod(0o644)
    yield elsewhere, ".* holds a secret, and other users can read it or own it: run chmod 600 on it, and chown it"
    secret.chmod(0o600)
    yield (
        elsewhere,
        ("the workers at tcp://.* refused the connection: the program at that address is not a worker of this pack"),
    )
    stranger.close()
    yield parallel(small(), "tcp://nowhere.invalid:9"), "no workers answer at tcp://nowhere.invalid:9 "
    secret.unlink()
    if before is not None:
        secret.touch(mode=0o600)
        secret.write_bytes(before)


def answer_strangely(listener: socket.socket) -> None:
    """Speak another protocol to the first client that connects."""
    connection, _ = listener.accept()
    with connection, contextlib.suppress(ConnectionError):
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9)
        connection.recv(1 << 16)


def videos_and_pictures(server: ComfyUI) -> Refusals:
    """Yield graphs of CogVideoX and PixArt with inputs for other models."""
    folder = server.base_dir / "models" / "diffusion_models"
    tiny_cogvideox.save_cogvideox(folder / "refused-video.safetensors", "2b-odd")
    for name, width in (("video", tiny_cogvideox.TEXT_WIDTH), ("other", 33)):
        save_file({"cond": draw(1, 7, width, seed=2)}, server.input_dir / f"{name}-refused.safetensors")
    save_latent(server, "refused-channels", 1, 4, 2, 6, 10)
    save_latent(server, "refused-empty", 1, 16, 0, 6, 10)
    yield video(latent="refused-channels"), "the latent has the shape .1, 4, 2, 6, 10. and CogVideoX takes .batch, 16"
    yield (
        video(latent="refused-empty"),
        "the latent has the shape .1, 16, 0, 6, 10., which is empty: use a batch of at l",
    )
    image = {"concat_latent_image": draw(1, 16, 3, 6, 10, seed=3)}
    yield (
        with_tensors(server, video(), "refused-image", image),
        "the conditioning has an image and this CogVideoX model",
    )
    tiny_pixart.save_pixart(folder / "refused-pixart.safetensors")
    text = {"cond": draw(1, 9, tiny_pixart.TEXT_WIDTH, seed=9)}
    save_file(text, server.input_dir / "picture-refused.safetensors")
    save_file(text | {"attention_mask": torch.ones(1, 4)}, server.input_dir / "masked-refused.safetensors")
    save_latent(server, "refused-16", 1, 16, 8, 8)
    save_latent(server, "refused-nothing", 1, 4, 0, 8)
    yield (
        picture(latent="refused-16"),
        "the latent has the shape .1, 16, 8, 8. and PixArt takes .batch, 4, height, width",
    )
    yield (
        picture(latent="refused-nothing"),
        "the latent has the shape .1, 4, 0, 8., which is empty: use a batch of at l",
    )
    yield (
        picture(prompt="other"),
        "the conditioning's text has the shape .1, 7, 33. and this model takes .batch, tokens",
    )
    yield picture(prompt="masked"), "the conditioning's attention_mask is for 4 text tokens and there are 9: save text"
    crossed = {"cross_attn_controlnet": draw(1, 9, 32, seed=1)}
    yield with_tensors(server, picture(), "refused-crossed", crossed), ".* in the conditioning cannot be used with this"
    save_gguf(
        folder / "refused-pixart.safetensors", folder / "refused-pixart.gguf", folder / "refused-values.safetensors"
    )
    oft = {"diffusion_model.blocks.0.attn.qkv.oft_blocks": torch.zeros(4, 144, 144)}
    save_file(oft, server.base_dir / "models" / "loras" / "refused-oft.safetensors")
    graph = picture(file="refused-pixart.gguf")
    graph = insert_after_model(graph, "LoraLoaderModelOnly", lora_name="refused-oft.safetensors", strength_model=1.0)
    yield (
        graph,
        "an adapter of the type oft mixes rows of blocks.0.attn.qkv.weight, which the workers split into several",
    )


def sound(server: ComfyUI) -> Refusals:
    """Yield graphs of videos with sound, and of inputs that only some of ComfyUI's models support."""
    save_families(server, "ltxav", "wan")
    clip = node("EmptyLTXVLatentVideo", width=128, height=160, length=17, batch_size=1)
    packed = node("LTXVConcatAVLatent", video_latent=["clip", 0], audio_latent=["clip", 0])
    graph = graph_of("ltxav") | {"clip": clip, "latent": packed}
    yield spread(graph), "the latent's sound has the shape .* and .* takes .batch, 8, length, 16.: use the empty latent"
    graph = parallel(small("tiny-dev"))
    graph |= {"reference": node("EmptySD3LatentImage", width=64, height=64, batch_size=1)}
    referenced = insert_after(graph, "positive", "ReferenceLatent", "conditioning", latent=["reference", 0])
    method = {"reference_latents_method": "index_timestep_zero"}
    reference = "ReferenceLatent after positive"
    graph = insert_after(referenced, reference, "FluxKontextMultiReferenceLatentMethod", "conditioning", **method)
    yield graph, "the reference latents method index_timestep_zero is not supported .offset, index, uxo are.: set it in"
    for name, given, said in (
        (
            "deep",
            torch.zeros(1, 1, 1, 1, 1, 1),
            "is nested too deeply to be sent to the workers: remove the node that adds",
        ),
        (
            "complex",
            torch.tensor(1j),
            "holds a complex, which cannot be sent to the workers: remove the node that adds it",
        ),
    ):
        other = with_tensors(server, referenced, f"refused-{name}", {"reference_latents_method": given})
        yield other, f"ref_latents_method.* in the conditioning {said}"
    vision = torch.zeros(1, 1, 1, 1, 1, 1, 1, 5, 1280)
    save_families(server, "wan_i2v")
    graph = with_tensors(server, graph_of("wan_i2v"), "refused-vision", {"clip_vision_output": vision})
    yield spread(graph), "the tensor .*clip_fea has 9 dimensions and 8 are the limit: reshape it"
    save_families(server, "hunyuan_i2v")
    save_latent(server, "hunyuan_i2v", 1, 16, 3, 8, 10)
    first = {"concat_latent_image": draw(1, 48, 3, 8, 10, seed=22)}
    yield (
        spread(with_tensors(server, graph_of("hunyuan_i2v"), "refused-first", first)),
        "the picture that is added to the latent, such as a first frame, has 49 channels with its mask and "
        "HunyuanVideoI2V takes 17: enc",
    )
    save_unread(server.base_dir / "models" / "diffusion_models", "wide_radiance")
    graph = graph_of("wan") | {"latent": node("EmptyChromaRadianceLatentImage", width=64, height=64, batch_size=1)}
    graph["model"]["inputs"]["unet_name"] = "wide_radiance-unread.safetensors"
    yield (
        spread(graph, patches=2),
        "pipefusion 1 with patches 2 cannot be used with this model, which needs the whole",
    )


def what_travels(server: ComfyUI) -> Refusals:
    """Yield graphs with data that cannot be sent to the workers in a message."""
    boxes = with_tensors(server, on_one_worker(small()), "refused-gligen", {"gligen": torch.ones(1)})
    yield boxes, "GLIGEN cannot be used with a parallel MODEL yet: "
    file = server.base_dir / "models" / "diffusion_models" / os.fsdecode(b"refused-\xff.safetensors")
    save_flux(server.base_dir / "refused-name.safetensors")
    (server.base_dir / "refused-name.safetensors").rename(file)
    graph = on_one_worker(small())
    graph["model"]["inputs"]["unet_name"] = file.name
    yield graph, "a number or name in the message .* cannot be sent .*: choose another one"
    file.unlink()


def linked(server: ComfyUI) -> Refusals:
    """Yield graphs with values over a link, or set by the page, which ComfyUI does not compare with a field's limits."""
    for kind, value, field, said in (
        ("PrimitiveInt", -1, "ulysses", "ulysses -1 is negative: use 0 .automatic., or 1 or more"),
        ("PrimitiveInt", -1, "patches", "patches -1 and warmup_steps . cannot be negative: use 0 .automatic. or more"),
        (
            "PrimitiveInt",
            3,
            "cfg",
            "cfg 3 is more than the 2 prompts, the positive and the negative one: use cfg 2 or 1",
        ),
        (
            "PrimitiveFloat",
            -1.0,
            "memory_limit",
            "memory_limit -1.0 is not an amount of memory: use gigabytes for each",
        ),
    ):
        plan: dict[str, Any] = {field: ["number", 0]}
        graph = parallel(small(), "cpu:2", **plan)
        yield graph | {"number": node(kind, value=value)}, said
    switch = {
        "word": node("PrimitiveString", value="other"),
        "switch": node("ComfySwitchNode", switch=True, on_true=["word", 0], on_false=["word", 0]),
    }
    for field, said in (
        ("weights", "weights 'other' is unknown: use replicated, sharded or streamed"),
        ("exchange", "exchange 'other' is unknown: use exact or fp8"),
        ("compile", "compile 'other' is unknown: use off or on"),
        ("attention", "attention 'other' is unknown: use one of auto, sdpa, "),
    ):
        chosen: dict[str, Any] = {field: ["switch", 0]}
        yield parallel(small(), "cpu:2", **chosen) | switch, said
    graph = parallel(small())
    graph["model"]["inputs"]["weight_dtype"] = ["switch", 0]
    yield graph | switch, "weight_dtype 'other' is unknown: use one of default, "
    said = "devices '99' asks for GPU 99, .* There is no Parallel Plan: devices are those of Settings > Parallel\\.$"
    yield unplanned(small(), devices="99"), said


def _reduced_guide(server: ComfyUI, graph: Graph) -> Graph:
    """Return a graph of LTX-Video with a guide of half the size, as an IC-LoRA's file requests."""
    models = server.base_dir / "models"
    tensors = load_file(save_tiny(models / "diffusion_models", "ltxv"))
    layer = "diffusion_model.transformer_blocks.0.attn1.to_q"
    (rows, columns), halved = (
        tensors["transformer_blocks.0.attn1.to_q.weight"].shape,
        {"reference_downscale_factor": "2"},
    )
    lora = {f"{layer}.lora_A.weight": draw(4, columns, seed=1), f"{layer}.lora_B.weight": draw(rows, 4, seed=2)}
    save_file(lora, models / "loras" / "refused-halved.safetensors", halved)
    graph = with_guides(server, graph | {"latent": LATENTS["ltxv"]}, "latent")
    graph["latent"] = node("EmptyLTXVLatentVideo", width=128, height=128, length=17, batch_size=1)
    graph["model"]["inputs"]["unet_name"] = "ltxv.safetensors"
    graph = insert_after_model(graph, "LoraLoaderModelOnly", lora_name="refused-halved.safetensors", strength_model=0.1)
    graph["parameters"] = node("GetICLoRAParameters", iclora_model=graph["sampler"]["inputs"]["model"])
    graph["end"]["inputs"]["iclora_parameters"] = ["parameters", 0]
    return graph


def sizes(server: ComfyUI) -> Refusals:
    """Yield graphs with latents, or inputs next to them, that do not fit the model."""
    for _, graph, said in wrong_sizes(server):
        yield spread(graph, strict=False), said


def computed(server: ComfyUI) -> Refusals:
    """Yield graphs whose faults only the computation shows: numbers that are NaN or infinite, and unsupported masks."""
    folder = server.base_dir / "models" / "diffusion_models"
    tensors = flux_tensors()
    tensors["final_layer.linear.bias"].fill_(torch.inf)
    save_file(tensors, folder / "refused-inf.safetensors")
    yield (
        parallel(small("refused-inf")),
        "Step 1 of 2: the model's output holds .* that are NaN or infinite, computed in",
    )
    save_tiny(folder, "hunyuan15")
    for side, seed in TOKENS.items():  # prompts of 7 tokens, as many as the mask has
        prompt = {"cond": draw(1, 7, TINY["hunyuan15"].text, seed=seed), "pooled_output": draw(1, 768, seed=1)}
        save_file(prompt, server.input_dir / f"refused-hunyuan-{side}.safetensors")
    graph = graph_of("hunyuan15")
    for side in TOKENS:
        graph[side]["inputs"]["conditioning"] = f"refused-hunyuan-{side}.safetensors"
    weighed = {"attention_mask": torch.full((1, 7), 0.5)}
    said = ".* has weights for tokens, or differs within a batch, which is not supported with a parallel MODEL: "
    # one branch per call: ComfyUI's own model does not support a mask of fractions for both branches at once
    yield spread(with_tensors(server, graph, "refused-weighed", weighed), cfg=2), said
    longer = {"attention_mask": (torch.arange(9) < 5)[None].long()}
    said = "the conditioning's attention_mask is for 9 tokens and its text has 7: encode the prompt again, or remove"
    yield spread(with_tensors(server, graph, "refused-longer", longer)), said
    yield (
        spread(
            _reduced_guide(server, with_tensors(server, graph, "refused-plain", {"attention_mask": torch.ones(1, 7)}))
        ),
        "the guides leave out 12 of the latent's 80 tokens, as an IC-LoRA",
    )
    save_families(server, "humo")
    save_latent(server, "humo", 1, 16, 3, 8, 10)
    sound = {"audio_embed": draw(1, 5, 8, 5, 1280, seed=29)}  # sound of five frames
    said = (
        "audio of the model's WanAttentionBlockAudio has 5 entries for 3 parts of the latent, which is not supported "
        "with a"
    )
    yield spread(with_tensors(server, graph_of("humo"), "refused-sound", sound), ring=2), said
    save_unread(folder, "wide_qwen", blocks=psutil.virtual_memory().total // 300_000_000)  # each block has 340 MB
    save_file({"cond": draw(1, 7, 3584, seed=7)}, server.input_dir / "refused-large.safetensors")
    graph = graph_of("wan") | {"latent": node("EmptySD3LatentImage", width=64, height=64, batch_size=1)}
    graph["model"]["inputs"]["unet_name"] = "wide_qwen-unread.safetensors"
    for side in TOKENS:
        graph[side]["inputs"]["conditioning"] = "refused-large.safetensors"
    yield (
        spread(graph, "cpu:1", weights="streamed"),
        "weights streamed takes .* of the computer's memory for each worker",
    )


def video(latent: str = "") -> Graph:
    size = {"width": 80, "height": 48, "length": 9, "batch_size": 1}
    given = node("LoadLatent", latent=f"{latent}.latent") if latent else node("EmptyHunyuanLatentVideo", **size)
    return of_family("LoadParallelCogVideoX", "refused-video.safetensors", "video", given)


def picture(*, file: str = "refused-pixart.safetensors", prompt: str = "picture", latent: str = "") -> Graph:
    empty = node("EmptyLatentImage", width=64, height=64, batch_size=1)
    given = node("LoadLatent", latent=f"{latent}.latent") if latent else empty
    return of_family("LoadParallelPixArt", file, prompt, given)


def of_family(loader: str, file: str, prompt: str, latent: dict[str, Any]) -> Graph:
    graph = family_graph(loader, "", "", latent, cfg=2.0)
    graph["model"]["inputs"]["unet_name"] = file
    for side in ("positive", "negative"):
        graph[side]["inputs"]["conditioning"] = f"{prompt}-refused.safetensors"
    return graph

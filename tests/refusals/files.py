"""Files that are refused in addition to those of of_flux: other containers, marks of quantisation, diffusers' models."""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.refusals.kinds import Refusals, literally
from tests.refusals.of_flux import on_one_worker, small
from tests.support.graphs.flux import Graph, node
from tests.support.tiny import cogvideox as tiny_cogvideox
from tests.support.tiny import pixart as tiny_pixart
from tests.support.tiny.flux import flux_tensors
from tests.support.tiny.formats import save_diffusers
from tests.support.tiny.quantised import save_quantised
from tests.support.tiny.vae import cogvideox_vae_tensors
from tests.vae.comfy_vaes import save_image_vae
from tests.weights.tiny import write_gguf


def stored(server: ComfyUI) -> Refusals:
    """Yield graphs with files in refused containers: GGUF, folders, links. tests/weights/test_formats.py has more."""
    folder = server.base_dir / "models" / "diffusion_models"
    write_gguf(folder / "whole.gguf", {"x": torch.zeros(64)}, {})
    write_gguf(folder / "part.gguf", {"x": torch.zeros(64)}, {}, numbers={"split.no": 0, "split.count": 2})
    whole, part = ((folder / f"{name}.gguf").read_bytes() for name in ("whole", "part"))
    for name, content, said in (
        (
            "old",
            whole[:4] + struct.pack("<I", 1) + whole[8:],
            "is GGUF version 1 and 3 is supported: convert it again.",
        ),
        ("short", whole[:40], "is truncated or damaged: its header does not end within 40 bytes and the file has 40"),
        ("part", part, "is part 1 of 2 of a model (the others are part-"),
        ("long", whole.replace(described(), described(dims=99)), "has a damaged header (tensor x has 99 dimensions)"),
    ):
        (folder / f"{name}.gguf").write_bytes(content)
        yield loading(f"{name}.gguf"), f"{name}.gguf {literally(said)}"
    link(folder / "gone.safetensors", folder / "nowhere.safetensors")
    yield loading("gone.safetensors"), "gone.safetensors is in none of ComfyUI's model folders: put it there or pick"
    link(folder / "unreadable.safetensors", Path("/proc/self/mem"))
    yield (
        loading("unreadable.safetensors"),
        "unreadable.safetensors cannot be read .Input/output error.: check the disk and its",
    )
    for name, said in (
        ("missing", "missing lacks the file {} that its index names: download it into {}\\.$"),
        ("lacking", ".*safetensors of lacking lacks the tensor .* that the index names: download it again"),
    ):
        shards = save_diffusers(folder / name, folder / f"{name}-single.safetensors", heads=1, shard="2MB")
        first, second, *_ = sorted(shards.glob("*.safetensors"))
        if name == "missing":
            first.unlink()
        else:
            first.write_bytes(second.read_bytes())
        yield loading(name), said.format(literally(first.name), literally(str(shards)))


def marked(server: ComfyUI) -> Refusals:
    """Yield graphs with damaged or unsupported marks of quantisation."""
    folder = server.base_dir / "models" / "diffusion_models"
    flux = flux_tensors(heads=1, double_blocks=1, single_blocks=1)
    int8 = load_file(save_quantised(folder / "int8.safetensors", flux, "int8"))
    layer = "single_blocks.0.linear2"
    for name, changed, said in (
        ("torn", {f"{layer}.comfy_quant": words('{"form')}, "has damaged quantisation settings ("),
        ("int3", {f"{layer}.comfy_quant": words('{"format": "int3"}')}, f"holds {layer}.weight as int3, which this ComfyUI"),
        ("a norm", {"single_blocks.0.norm.query_norm.comfy_quant": words('{"format": "int8_tensorwise"}')},
         "holds single_blocks.0.norm.query_norm quantised, which is supported for linear layers only"),
        ("narrow", {f"{layer}.weight": torch.zeros(128, 10, dtype=torch.int8)},
         f"holds {layer}.weight as int8_tensorwise in a form that ComfyUI cannot load ("),
    ):  # fmt: skip
        save_file(int8 | changed, folder / f"{name}.safetensors")
        yield on_one_worker(small(name)), f"{name}.safetensors {literally(said)}"
    save_diffusers(folder / "names", folder / "names-single.safetensors", heads=1, shard="1GB")
    (single,) = (folder / "names").glob("*.safetensors")
    tensors = load_file(single) | {"x_embedder.weight_scale": torch.ones(())}
    save_file(tensors, folder / "scaled-names.safetensors")
    yield (
        on_one_worker(small("scaled-names")),
        "scaled-names.safetensors holds x_embedder.weight_scale under diffusers'",
    )


def of_diffusers(server: ComfyUI) -> Refusals:
    """Yield graphs with files of CogVideoX and PixArt. tests/weights/test_formats.py has those with scales."""
    folder = server.base_dir / "models" / "diffusion_models"
    video = load_file(tiny_cogvideox.save_cogvideox(folder / "whole-video.safetensors", "2b-odd"))
    wide = load_file(tiny_cogvideox.save_cogvideox(folder / "wide-video.safetensors", "1.5"))
    picture = load_file(tiny_pixart.save_pixart(folder / "whole-picture.safetensors"))
    layer = "blocks.0.norm1.linear"
    for name, tensors, said in (
        (
            "fun",
            wide | {"patch_embed.proj.weight": repeated(wide["patch_embed.proj.weight"], 3)},
            "takes 48 latent channels",
        ),
        (
            "learned",
            video | {"patch_embed.pos_embedding": torch.zeros(1, 99, 80)},
            "has learned positions for 99 tokens",
        ),
        (
            "nvfp4",
            video | {f"{layer}.comfy_quant": words('{"format": "nvfp4"}')},
            f"holds {layer}.weight as nvfp4, which is not supported (float8_e4m3fn, float8_e5m2 are): choose another file.",
        ),
        ("part of a video", without(video, "blocks.0.norm_q.weight"), "lacks the CogVideoX tensor "),
        (
            "flat",
            video | {"patch_embed.text_proj.weight": torch.zeros(80)},
            "holds patch_embed.text_proj.weight with the sh",
        ),
        (
            "odd width",
            video | {"patch_embed.proj.weight": torch.zeros(72, 16, 2, 2)},
            "has 72 features and no rotary posi",
        ),
    ):
        save_file(tensors, folder / f"{name}.safetensors")
        yield loading(f"{name}.safetensors", "CogVideoX"), f"{name}.safetensors {literally(said)}"
    names = {name: tensor.contiguous() for name, tensor in tiny_pixart.pixart().state_dict().items()}
    query = "transformer_blocks.0.attn1.to_q.weight"
    for name, tensors, said in (
        (
            "compressed",
            picture | {"blocks.0.attn.sr.weight": torch.zeros(1)},
            "compresses its keys and values, which is",
        ),
        ("part of a picture", without(picture, "y_embedder.y_proj.fc1.weight"), "lacks the PixArt tensor "),
        (
            "odd heads",
            picture | {"x_embedder.proj.weight": torch.zeros(190, 4, 2, 2)},
            "has 190 features, which is not a multiple of its 16 atten",
        ),
        ("no query", without(names, query), f"lacks the tensor {query}: choose a complete checkpoint."),
        (
            "few rows",
            names | {query: torch.zeros(5, 192)},
            f"holds {query} with the shape [5, 192] and 192 rows are needed",
        ),
        ("narrow query", names | {query: torch.zeros(192, 5)}, "has damaged tensors ("),
    ):
        save_file(tensors, folder / f"{name}.safetensors")
        yield loading(f"{name}.safetensors", "PixArt"), f"{name}.safetensors {literally(said)}"


def vaes(server: ComfyUI) -> Refusals:
    """Yield graphs with files of CogVideoX' VAE. tests/weights/test_vae_files.py and tests/features/test_vae.py have others."""
    folder = server.base_dir / "models" / "vae"
    vae = cogvideox_vae_tensors()
    width = "encoder.down_blocks.0.resnets.0.conv2.conv.weight"
    for name, tensors, said in (
        ("levels", {k: v for k, v in vae.items() if "down_blocks.1." not in k and "down_blocks.2." not in k
                    and "down_blocks.3." not in k}, "has 1 levels and CogVideoX has 4: choose another VAE file."),
        ("no width", without(vae, width), f"lacks the tensor '{width}': choose a complete VAE file."),
    ):  # fmt: skip
        save_file(tensors, folder / f"{name}.safetensors")
        yield decoding(f"{name}.safetensors"), f"{name}.safetensors {literally(said)}"
    save_image_vae(folder / "pictures.safetensors", torch.float16)
    graph = decoding("pictures.safetensors")
    graph["pixels"]["class_type"] = "CogVideoParallelDecode"
    yield (
        graph,
        r"CogVideoX Parallel Decode was given an image VAE \(.+\) and decodes videos: choose a video VAE, or use VAE Decode",
    )
    pictures = load_file(folder / "pictures.safetensors")
    save_file({k: v for k, v in pictures.items() if not k.startswith("encoder.")}, folder / "decoder.safetensors")
    graph = decoding("decoder.safetensors")
    graph["picture"] = node("EmptyImage", width=64, height=64, batch_size=1, color=0)
    graph["encoded"] = node("VAEEncode", pixels=["picture", 0], vae=["vae", 0])
    graph["save"] = node("SaveLatent", samples=["encoded", 0], filename_prefix="encoded")
    yield graph, r"decoder.safetensors lacks the tensor encoder\.\S+, so it can decode but not encode"


def loading(file: str, family: str = "Flux") -> Graph:
    """Return a graph of a family's loader with a file, on one worker."""
    graph = on_one_worker(small())
    graph["model"]["class_type"] = f"LoadParallel{family}"
    graph["model"]["inputs"]["unet_name"] = file
    return graph


def decoding(vae: str) -> Graph:
    return {
        "plan": node("ParallelPlan", devices="cpu:1"),
        "vae": node("LoadParallelVAE", vae_name=vae, frame_batches="comfyui", plan=["plan", 0]),
        "latent": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "pixels": node("VAEDecode", samples=["latent", 0], vae=["vae", 0]),
        "save": node("PreviewImage", images=["pixels", 0]),
    }


def link(file: Path, target: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(target)


def described(*, dims: int = 1) -> bytes:
    """Return the description of a tensor x of 64 numbers in a GGUF file's header."""
    return b"x" + struct.pack("<IQI", dims, 64, 0)


def words(text: str) -> Tensor:
    """Return a text as a file stores a mark of quantisation."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def repeated(tensor: Tensor, times: int) -> Tensor:
    """Return the tensor with `times` as many channels."""
    return torch.cat([tensor] * times, dim=1)

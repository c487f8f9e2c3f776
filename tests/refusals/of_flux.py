"""Plans, prompts, latents, nodes, adapters and files that a parallel FLUX MODEL refuses, and the refusals' sentences."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file

from scripts.comfyui import ComfyUI
from tests.support.graphs.flux import (
    Graph,
    ksampler_graph,
    node,
    parallel,
)
from tests.support.tiny.flux import CHANNELS, POOLED_WIDTH, TEXT_WIDTH, flux_tensors, save_conditioning

WAY_OUT = "the weights live in the workers; remove that node, or use Load Diffusion Model."
SEEDS = itertools.count(2200)


def small(model: str = "tiny-schnell", **settings: Any) -> Graph:
    """Return a small graph with a new seed, so that ComfyUI has no cached result of it."""
    return ksampler_graph(model, **{"width": 64, "height": 64, "steps": 2, "cfg": 2.0, "seed": next(SEEDS)} | settings)


def is_one_sentence(message: str) -> bool:
    return message.endswith(".") and "Traceback" not in message and not re.search(r"[.!?]\s|\n", message)


def assert_one_sentence(message: str) -> None:
    assert is_one_sentence(message), message


def on_one_worker(graph: Graph) -> Graph:
    """Return the graph on another plan than that of the running workers, so that the log would show a start of workers."""
    return parallel(graph, "cpu:1")


MODEL_NODES: dict[str, tuple[dict[str, Any], str]] = {
    "HyperTile": (
        {"tile_size": 256, "swap_size": 2, "max_depth": 0, "scale_depth": False},
        "attention and block patches (attn1_patch, attn1_output_patch)",
    ),
    "SelfAttentionGuidance": ({"scale": 0.5, "blur_sigma": 2.0}, "replaced attention or blocks (attn1)"),
    "FluxKVCache": ({}, "Replacing diffusion_model.params.default_ref_method"),
    "LoraLoaderBypassModelOnly": (
        {"lora_name": "tiny-lora.safetensors", "strength_model": 1.0},
        "Applying a LoRA in bypass mode",
    ),
}
PERTURBED = {"scale": 3.0}
"""Inputs of PerturbedAttentionGuidance."""
LAYER = "diffusion_model.single_blocks.0.linear2"
LORAS: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "a new value of another shape": (
        {f"{LAYER}.set_weight": (512, 3)},
        "ComfyUI cannot apply this LoRA to diffusion_model.single_blocks.0.linear2.weight, which has the shape [512, 2560] "
        "(The size of tensor a (2560) must match the size of tensor b (3) at non-singleton dimension 1): choose another LoRA.",
    ),
    "BOFT": (
        {f"{LAYER}.oft_blocks": (2, 16, 32, 32), f"{LAYER}.alpha": ()},
        f"an adapter of the type boft cannot be applied to a parallel MODEL: {WAY_OUT}",
    ),
    "a LoRA that enlarges img_in": (
        {
            "img_in.lora_A.weight": (2, 128),
            "img_in.lora_B.weight": (512, 2),
            "single_blocks.0.norm.key_norm.scale": (128,),
        },
        "a LoRA that enlarges a weight (FLUX.1 Canny and Depth LoRAs do) cannot be applied to a parallel MODEL: "
        f"{WAY_OUT}",
    ),
    "Tucker": (
        {f"{LAYER}.hada_w{part}_a": (2, 512) for part in (1, 2)}
        | {f"{LAYER}.hada_w{part}_b": (2, 2560) for part in (1, 2)}
        | {f"{LAYER}.hada_t{part}": (2, 2, 1, 1) for part in (1, 2)},
        f"a Tucker-decomposed adapter (for convolutions) cannot be applied to a parallel MODEL: {WAY_OUT}",
    ),
}
SCHNELL = flux_tensors(heads=1, double_blocks=1, single_blocks=1)
SCHNELL_FILE = save(SCHNELL)
HEADER = 8 + int.from_bytes(SCHNELL_FILE[:8], "little")


def with_tensor(name: str, tensor: torch.Tensor) -> bytes:
    return save(SCHNELL | {name: tensor})


def of_unknown_type(name: str) -> bytes:
    header = json.loads(SCHNELL_FILE[8:HEADER])
    header[name]["dtype"] = "F4"
    return with_header(json.dumps(header).encode()) + SCHNELL_FILE[HEADER:]


def with_header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


QKV, NORM = "double_blocks.0.img_attn.qkv.weight", "double_blocks.0.txt_attn.norm.key_norm.scale"
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "(0 bytes) is neither a safetensors nor a GGUF file: download it again, or choose another file."),
    "cut in the header": (
        SCHNELL_FILE[:100],
        f"is truncated: its header takes {HEADER} bytes and the file has 100; download it again.",
    ),
    "cut in the data": (
        SCHNELL_FILE[:-1],
        f"is truncated: it should have {len(SCHNELL_FILE)} bytes and has {len(SCHNELL_FILE) - 1}; download it again.",
    ),
    "a pickle": (
        b"PK\x03\x04" + bytes(range(256)) * 8,
        "is a PyTorch pickle, which is not supported (it can run code)",
    ),
    "a header nested too deeply": (with_header(b"[" * 100_000), "has a damaged header (maximum recursion depth"),
    "a header with a tensor of no length": (
        with_header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'),
        "has a damaged header (tensor a has 4 bytes for 8)",
    ),
    "a header with an unknown type": (
        of_unknown_type("img_in.bias"),
        "holds img_in.bias as F4, a type not supported: choose a file in fp32, fp16, bf16 or fp8, or a GGUF file of "
        "Q2_K to Q8_0.",
    ),
    "Stable Diffusion": (
        save({"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(8, 4, 3, 3)}),
        "is no diffusion model that ComfyUI knows under these tensor names: choose another file.",
    ),
    "diffusers' names": (
        save({"x_embedder.weight": torch.zeros(8, 64), "transformer_blocks.0.attn.to_q.weight": torch.zeros(8, 8)}),
        "lacks rows of the tensor x_embedder.bias: choose a complete file.",
    ),
    "FLUX.2, damaged": (
        with_tensor("double_stream_modulation_img.lin.weight", torch.zeros(768, 128)),
        "which does not fit a model of 128 features: choose another Flux2 file.",
    ),
    "no norm": (
        save({key: tensor for key, tensor in SCHNELL.items() if key != NORM}),
        "lacks the tensor double_blocks.0.txt_attn.norm.key_norm.weight: choose a complete FluxSchnell file.",
    ),
    "too many columns": (
        with_tensor(QKV, torch.zeros(384, 129)),
        f"holds {QKV} with the shape [384, 129], which does not fit a model of 128 features: choose another "
        "FluxSchnell file.",
    ),
    "a matrix as a scalar": (
        with_tensor("txt_in.weight", torch.zeros(())),
        "has tensors from which ComfyUI cannot make a model (IndexError: tuple index out of range): choose another "
        "file.",
    ),
    "int8": (
        with_tensor(QKV, torch.zeros(384, 128, dtype=torch.int8)),
        f"holds {QKV} as I8 in rows of 128 bytes, which is not supported: choose a file with weights in fp32, fp16, bf16 "
        "or fp8, or a GGUF file.",
    ),
}
PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "a GPU that is not there": (
        {"devices": "0"},
        "devices '0' asks for GPU 0, but no GPU is visible: run nvidia-smi; if it lists GPUs, --cuda-device or "
        "CUDA_VISIBLE_DEVICES hides them or torch cannot use them, and if not, install the NVIDIA driver (cpu:2 in devices is "
        "for trials without GPUs).",
    ),
    "a fruit": (
        {"devices": "banana"},
        'devices \'banana\' is not understood: write "auto", "all", GPU indices such as "0,1" or "0-3", or "cpu:2".',
    ),
    "no CPU worker": ({"devices": "cpu:0"}, "devices 'cpu:0': write cpu:N with N from 1 to 64, such as cpu:2."),
    "an odd ulysses": (
        {"devices": "cpu:2", "ulysses": 3},
        "3 workers were asked for (ulysses 3), but 2 devices are there (devices 'cpu:2'): set ulysses to 2, or to 0 for "
        "automatic.",
    ),
    "more workers than heads": (
        {"devices": "cpu:8", "ulysses": 8},
        "ulysses 8 is more than the model's 4 attention heads: set ulysses to 4, or to 0 for automatic.",
    ),
    "a ring that leaves more workers than heads": (
        {"devices": "cpu:8", "ring": 1, "data": 1},
        "ring 1, and 8 devices are there: that leaves ulysses 8, more than the model's 4 attention heads; set ring to 2, or to "
        "0 for automatic.",
    ),
    "automatic devices without GPUs": (
        {"devices": "auto", "ulysses": 4, "ring": 1},
        "4 workers were asked for (ulysses 4), but no GPU is visible: set ulysses to 1, or to 0 for automatic, or set devices "
        "to cpu:4 to try it without GPUs.",
    ),
    "more stages than blocks": (
        {"devices": "cpu:4", "pipefusion": 4},
        "pipefusion 4 is more than the model's 3 blocks: set pipefusion to 1, or to 0 for automatic.",
    ),
    "stages of other blocks": (
        {"devices": "cpu:2", "pipefusion": 2, "stages": "1,1"},
        "stages '1,1' is 2 stages with 1 + 1 = 2 blocks, but pipefusion 2 needs 2 stages and the model has 3 blocks: write "
        '"1,2", or leave it empty.',
    ),
    "stages that are no numbers": (
        {"devices": "cpu:2", "pipefusion": 2, "stages": "half"},
        "stages 'half' is not understood: write the blocks of each stage, such as \"1,2\", or leave it empty.",
    ),
    "more patches than rows": (
        {"devices": "cpu:2", "pipefusion": 2, "patches": 9},
        "patches 9 is more than the picture's 4 rows of tokens: use patches 4 at most, or a taller picture.",
    ),
    "more groups than pictures": (
        {"devices": "cpu:2", "data": 2},
        "data 2 is more than the batch of 1: use data 1 or a larger batch.",
    ),
    "weights split twice": (
        {"devices": "cpu:2", "pipefusion": 2, "weights": "sharded"},
        "weights sharded cannot be used with pipefusion 2, which splits the weights already: use weights replicated, or "
        "pipefusion 1.",
    ),
    "flash on the CPU": (
        {"devices": "cpu:1", "attention": "flash"},
        "attention flash cannot be used: flash-attn runs on GPUs only and this worker is on the cpu; use auto or sdpa.",
    ),
    "sage on the CPU": (
        {"devices": "cpu:1", "attention": "sage"},
        "attention sage cannot be used: SageAttention runs on GPUs only and this worker is on the cpu; use auto or sdpa.",
    ),
}


def latent(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[3:5] = torch.tensor([float("nan"), float("inf")])
    return tensor


def from_file(comfyui: ComfyUI, tensor: torch.Tensor, name: str = "wrong") -> Graph:
    """Return a graph that starts from a latent in a file."""
    tensors = {"latent_tensor": tensor, "latent_format_version_0": torch.tensor([])}
    save_file(tensors, comfyui.input_dir / f"{name}.latent")
    graph = on_one_worker(small(denoise=0.5))
    graph["latent"] = node("LoadLatent", latent=f"{name}.latent")
    return graph


TAKES = f"and FluxSchnell takes [batch, {CHANNELS}, height, width]: use the empty latent or the VAE that belongs to this model."
EMPTY = "which is empty: use a batch of at least 1 and at least 16 x 16 pixels."
LATENTS: dict[str, tuple[torch.Tensor, str]] = {
    "no width": (latent(1, CHANNELS, 8, 0), f"the latent has the shape [1, 16, 8, 0], {EMPTY}"),
    "no pictures": (latent(0, CHANNELS, 8, 8), f"the latent has the shape [0, 16, 8, 8], {EMPTY}"),
    "4 channels": (latent(1, 4, 8, 8), f"the latent has the shape [1, 4, 8, 8] {TAKES}"),
    "a video": (latent(1, CHANNELS, 2, 8, 8), f"the latent has the shape [1, 16, 2, 8, 8] {TAKES}"),
    "NaN": (
        with_nan(latent(1, CHANNELS, 8, 8)),
        "the latent holds 2 values of 1024 that are NaN or infinite: look at the node it comes from "
        "(a text encoder or VAE in too low a precision does that).",
    ),
}


def conditioning(**settings: Any) -> Callable[[Path], Any]:
    return lambda path: save_conditioning(path, **{"tokens": 5} | settings)


CONDITIONINGS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "narrow text": (
        conditioning(width=32),
        "the conditioning's text is of the shape [1, 5, 32] and FluxSchnell takes [batch, tokens, 64]: use the text encoder that "
        "belongs to this model.",
    ),
    "narrow pooled text": (
        conditioning(pooled_width=16),
        "the conditioning's pooled text is 16 wide and FluxSchnell takes 32: use the text encoders that belong to this model.",
    ),
    "no tokens": (
        conditioning(tokens=0),
        "the conditioning's text has the shape [1, 0, 64] and at least one token is needed: encode a prompt.",
    ),
    "NaN in the text": (
        lambda path: save_file(
            {"cond": with_nan(torch.zeros(1, 5, TEXT_WIDTH)), "pooled_output": torch.zeros(1, POOLED_WIDTH)}, path
        ),
        "the conditioning (context) holds 2 values of 320 that are NaN or infinite: look at the node it comes from "
        "(a text encoder or VAE in too low a precision does that).",
    ),
}

"""The weights that a rank reads of a text encoder's files are those of ComfyUI's own loader, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.text_encoders import counted
from parallel_backend.diffusion import ModelSpec, TextEncoderFiles
from parallel_backend.models.comfyui.text_encoder import read_text_encoder
from parallel_backend.weights.adapters.merging import Keep
from parallel_backend.weights.files.checkpoint import read_header
from parallel_backend.weights.files.keymap import Piece
from parallel_backend.weights.loading.reading import Neighbours, Watch
from parallel_backend.weights.stores.replicated import ALONE
from parallel_backend.worker.requests.text_encoding import TextEncoderPart
from tests.support.ranks import run_ranks
from tests.support.selection import thorough
from tests.support.sparse_files import write_sparse

# isort: split
import comfy.sd
from comfy.text_encoders import lt

CPU = torch.device("cpu")


def read(path: Path, kind: str) -> tuple[Any, int]:
    """Return the encoder of a file as one rank reads it, and the bytes that the rank has read."""
    bytes_read: list[int] = []
    watch = Watch(lambda: False, lambda done, total: None, bytes_read.append)
    text = TextEncoderFiles(kind)
    spec = ModelSpec("comfyui text encoder", str(path), 0, 0, "float32", text=text)
    keep = Keep(lambda nbytes: True, lambda flag: flag)
    part = TextEncoderPart(spec, CPU, ALONE, Neighbours(ALONE, (0,)), watch, keep)
    part.fill()
    return part.module, sum(bytes_read)


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the names and the fused matrices of OpenCLIP, and the projection transposed as in old files."""
    renamed = {
        "positional_embedding": tensors["text_model.embeddings.position_embedding.weight"],
        "token_embedding.weight": tensors["text_model.embeddings.token_embedding.weight"],
        "ln_final.weight": tensors["text_model.final_layer_norm.weight"],
        "ln_final.bias": tensors["text_model.final_layer_norm.bias"],
        "text_projection": torch.randn(768, 768, dtype=torch.float16),
    }
    names = {
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
        "self_attn.out_proj": "attn.out_proj",
    }
    for block in range(12):
        ours, theirs = f"text_model.encoder.layers.{block}", f"transformer.resblocks.{block}"
        for last in ("weight", "bias"):
            renamed |= {f"{theirs}.{new}.{last}": tensors[f"{ours}.{old}.{last}"] for old, new in names.items()}
            qkv = [tensors[f"{ours}.self_attn.{part}_proj.{last}"] for part in "qkv"]
            renamed[f"{theirs}.attn.in_proj_{last}"] = torch.cat(qkv)
    return {name: tensor.contiguous() for name, tensor in renamed.items()}


# features/test_text_encoders has the texts of an unchanged file bit by bit, and the next test the bytes read of it
@pytest.mark.parametrize("change", [pytest.param(dict, marks=thorough), fused])
def test_a_ranks_weights_are_comfyuis_and_every_byte_is_read_once(
    tmp_path: Path, clip_l: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    path = tmp_path / "clip-l.safetensors"
    tensors = change(load_file(clip_l))
    save_file(tensors, path)
    module, nbytes = read(path, "stable_diffusion")
    theirs = comfy.sd.load_clip([str(path)]).cond_stage_model.state_dict()
    ours = module.state_dict()
    assert ours.keys() == theirs.keys()
    assert len(theirs) > 190
    differ = [
        name for name in theirs if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name])
    ]
    assert differ == []
    computed = tensors["text_projection"].nbytes if change is fused else 0
    assert nbytes == sum(tensor.nbytes for tensor in tensors.values()) - computed


def test_three_ranks_share_the_reading_and_hold_their_blocks_and_the_shared_tensors(clip_l: Path) -> None:
    sizes = {name: tensor.nbytes for name, tensor in load_file(clip_l).items()}
    whole = sum(sizes.values())
    blocks = sum(nbytes for name, nbytes in sizes.items() if ".layers." in name)
    found = run_ranks(3, functools.partial(counted, clip_l, "stable_diffusion", 3))
    assert sum(read for read, *_ in found) == whole
    share = whole - blocks + blocks // 3
    assert all(share <= held < share + 16 for _, held, *_ in found), "4 bytes are of a number that no file has"
    results = 4 * 2 * 77 * 768 * 4  # of four blocks, to two ranks, in fp32
    assert all(results <= nbytes < 1.1 * results for *_, nbytes, _ in found)


def test_ltx_2_takes_its_projection_from_its_own_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the headers of a Gemma 3 12B and of an LTX-2 checkpoint. Both files are sparse: they have real sizes and no values."""
    monkeypatch.setattr(lt, "LTXAVGemmaTokenizer", lambda **_: None)  # its model is one of the file's tensors
    with torch.device("meta"):
        encoder = lt.ltxav_te(dtype_llama=torch.bfloat16, text_projection_type="single_linear")(dtype=torch.bfloat16)
    gemma = write_sparse(tmp_path / "gemma_3_12B.safetensors", encoder.gemma3_12b.transformer.state_dict())
    name = "text_embedding_projection.aggregate_embed.weight"
    tensors = {name: encoder.text_embedding_projection.weight, "model.diffusion_model.proj.weight": torch.empty(2, 2)}
    checkpoint = write_sparse(tmp_path / "ltx-2.safetensors", tensors)
    found = read_text_encoder([read_header(gemma), read_header(checkpoint)], "ltxv", CPU, dynamic=False)
    assert found.keys["text_embedding_projection.weight"] == Piece(f"1.{name}", 0, 3840, (3840 * 49,))
    assert {piece.name.partition(".")[0] for piece in found.keys.values()} == {"0", "1"}
    assert "1.model.diffusion_model.proj.weight" not in {piece.name for piece in found.keys.values()}

"""The memory of text encoders on several GPUs: the command, the parameters of ComfyUI's own classes, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_backend.errors import PlanRefused, Refused
from parallel_backend.host.planning.devices import DeviceMemory
from parallel_backend.host.runs.encoder_room import EncoderRoom, GpuRoom, emptiest_gpu
from parallel_backend.models.comfyui.divided_blocks import bytes_by_rank
from parallel_backend.plan.__main__ import main
from parallel_backend.plan.predict.text_encoders import known_text_encoder, text_encoder_names
from tests.support.comfy_oracle import comfy_on_path

Make = Callable[..., Any]


def classes() -> dict[str, Make]:
    """Return functions that make the known encoders' modules of ComfyUI's classes."""
    comfy_on_path()
    from comfy.text_encoders import llama, minimax, t5

    def of_t5(name: str) -> Make:
        file = Path(t5.__file__).with_name(f"{name}_config_xxl.json")
        return lambda _, **settings: t5.T5(json.loads(file.read_text(encoding="utf-8")), **settings)

    return {
        "qwen3-vl-32b": minimax.MiniMaxQwen3VL,
        "mistral-24b": llama.Mistral3Small24B,
        "gemma3-12b": llama.Gemma3_12B,
        "qwen2.5-vl-7b": llama.Qwen25_7BVLI,
        "llama3-8b": llama.Llama2,
        "qwen3-4b": llama.Qwen3_4B,
        "umt5-xxl": of_t5("umt5"),
        "t5-xxl": of_t5("t5"),
    }


@pytest.mark.parametrize("name", text_encoder_names())
def test_sizes_equal_those_of_comfyuis_class(name: str) -> None:
    makers = classes()
    import comfy.ops

    module = makers[name]({}, dtype=torch.bfloat16, device="meta", operations=comfy.ops.disable_weight_init)
    known = known_text_encoder(name)
    assert known.parameters == pytest.approx(sum(parameter.numel() for parameter in module.parameters()), rel=1e-5)
    for ranks in (1, 2, 3):
        found = [nbytes / 2 for nbytes in bytes_by_rank(module, ranks)]
        assert known.parameters_by_rank(ranks) == pytest.approx(found, rel=1e-4)


def test_the_command_tells_the_memory_of_each_gpu_for_a_known_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--text-encoder", "qwen3-vl-32b", "--card", "4090"]) == 0
    head, _, _, *rows, last = capsys.readouterr().out.splitlines()
    assert head == "qwen3-vl-32b in bf16 (51.5 GB of weights), the text encoder of MiniMax-H3; 4090 with 24.0 GB"
    assert [row.split()[:2] for row in rows] == [["1", "52.4"], ["2", "27.5"], ["4", "15.5"], ["8", "9.5"]]
    assert [row.endswith("does not fit") for row in rows] == [True, True, False, False]
    assert "they do not encode faster" in last
    main(["--text-encoder", "qwen3-vl-32b", "--dtype", "fp8", "--devices", "2"])
    assert "\n   2      14.2\n" in capsys.readouterr().out
    with pytest.raises(Refused, match="the text encoder 'another' is unknown: use qwen3-vl-32b"):
        known_text_encoder("another")


CARDS = [DeviceMemory(f"cuda:{index}", "NVIDIA GeForce RTX 4090", 24_000_000_000, None) for index in range(2)]


def room(*held: int, devices: tuple[str, ...] = ("cuda:0", "cuda:1"), limit: float = 0.0) -> EncoderRoom:
    return EncoderRoom(devices, held, sum(held), [*CARDS, DeviceMemory("cpu", "", 32_000_000_000, None)], limit)


def test_devices_that_cannot_hold_their_part_are_refused_before_reading() -> None:
    room(22_000_000_000, 23_000_000_000).check()
    with pytest.raises(
        PlanRefused,
        match=r"^Not enough memory for the text encoder: its workers on cuda:1 need 24\.85 GB \(46\.00 GB of weights over 2 "
        r"workers\), and cuda:1 has 24\.00 GB: use more devices, or a file with smaller weights \(fp8\)\.$",
    ):
        room(22_000_000_000, 24_000_000_000).check()
    with pytest.raises(
        PlanRefused, match=r"on cuda:0 need 10\.85 GB .* and cuda:0 has 8\.00 GB \(memory_limit 8\): use"
    ):
        room(10_000_000_000, 10_000_000_000, limit=8e9).check()
    with pytest.raises(PlanRefused, match=r"on cpu need 40\.00 GB"):
        room(20_000_000_000, 20_000_000_000, devices=("cpu", "cpu")).check()
    room(1 << 60, devices=("tcp://host:1/cuda:0",)).check()  # another machine's memory is not known here


def test_the_node_says_how_much_each_holds_and_whether_one_gpu_would_do() -> None:
    assert room(12_000_000_000, 13_000_000_000).in_words() == "2 GPUs: 13.0 GB each"
    small = room(5_000_000_000, 4_000_000_000)
    assert small.in_words() == "2 GPUs: 5.00 GB each; one GPU holds all of it, and Load CLIP encodes as fast"
    assert room(5_000_000_000, devices=("cuda:0",)).in_words() == "1 GPU: 5.00 GB"
    assert room(5_000_000_000, 5_000_000_000, devices=("cpu", "cpu")).in_words() == "2 workers: 5.00 GB each"


def test_one_gpu_holds_an_encoder_that_fits_into_the_most_free_memory() -> None:
    gpus = [
        DeviceMemory(f"cuda:{index}", "", 24_000_000_000, free) for index, free in enumerate((2, 9_000_000_000, None))
    ]
    assert emptiest_gpu(["cuda:0", "cuda:1"], gpus) == GpuRoom(9_000_000_000)
    assert emptiest_gpu(["cuda:0", "cuda:1", "cuda:2"], gpus) == GpuRoom(24_000_000_000), "unknown: all of it"
    assert emptiest_gpu(["cuda:1"], gpus, limit=4e9) == GpuRoom(4e9)
    assert emptiest_gpu(["cpu", "tcp://host:1/cuda:0"], gpus) is None
    gpu = GpuRoom(9_000_000_000)
    assert gpu.holds(8_150_000_000) and not gpu.holds(8_150_000_001), "beside a CUDA context"
    assert not EncoderRoom(("cuda:1",), (9_000_000_000,), 9_000_000_000, gpus).one_holds_it
    said = gpu.why_too_small("t5.safetensors", 51_500_000_000)
    assert (
        said == "t5.safetensors needs 52.35 GB on one GPU (51.50 GB of weights), and no GPU has more than 9.00 GB free."
    )

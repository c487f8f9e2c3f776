"""Formats: blocks expand as in the gguf package, and damaged or unsupported checkpoints are refused by name."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import resource
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from parallel_backend.errors import Refused
from parallel_backend.models.families import FAMILIES
from parallel_backend.models.family import Stage
from parallel_backend.plan.predict.profiles import UNPACKING
from parallel_backend.weights.files.checkpoint import read_header
from parallel_backend.weights.formats import BLOCK_TYPES, PLAIN
from parallel_backend.weights.layers.packing import quantised_matrices, resident_bytes, shape_parameters
from tests.support.comfy_oracle import comfy_on_path
from tests.support.selection import product
from tests.support.tiny.cogvideox import save_cogvideox
from tests.support.tiny.flux import save_flux
from tests.support.tiny.formats import HALVES, random_blocks, save_diffusers, save_gguf, save_scaled, write_scaled
from tests.support.tiny.models import save_model
from tests.support.tiny.pixart import pixart
from tests.wire.messages import mutated

comfy_on_path()

SHAPE = {"heads": 1, "single_blocks": 1}
QUICK_CASES, ALL_CASES = 420, 2100
STORED = {storage.name: storage.nbytes for storage in PLAIN.values()}
"""Bytes of a value, by its dtype's name in safetensors."""

ROOM = 256 << 20
SECONDS = 5.0
"""Seconds of a CPU."""


def refusal(path: Path, family: str = "comfyui") -> str:
    with pytest.raises(Refused) as refused:
        FAMILIES[family].inspect(read_header(path))
    message = str(refused.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_blocks_expand_bit_for_bit_as_the_gguf_package_does(kind: Type) -> None:
    blocks = random_blocks(kind, 96, 512, seed=int(kind))
    expected = torch.from_numpy(gguf.dequantize(blocks, kind))
    storage, rows = BLOCK_TYPES[kind], torch.from_numpy(blocks)
    assert torch.equal(storage.expand(rows, torch.float32), expected)
    assert torch.equal(storage.expand(rows, torch.bfloat16), expected.bfloat16())
    assert torch.equal(storage.expand(rows[32:64].clone(), torch.float32), expected[32:64]), "rows of a fused tensor"


def test_the_block_types_are_all_supported() -> None:
    assert set(BLOCK_TYPES) == set(HALVES)


def test_weights_expanded_or_multiplied_in_each_forward_are_known_from_the_header(tmp_path: Path) -> None:
    def used(path: Path, dtype: torch.dtype, fast: bool = False) -> tuple[float, str]:
        part, _ = FAMILIES["comfyui"].inspect(read_header(path))
        quantised = quantised_matrices(part, dtype, 2, fast)
        return quantised.moved, quantised.multiplied

    plain = save_flux(tmp_path / "plain.safetensors", **SHAPE)
    matrices = [tensor for tensor in load_file(plain).values() if tensor.ndim == 2]
    inside = [t for name, t in load_file(plain).items() if t.ndim == 2 and "blocks" in name]
    assert used(plain, torch.bfloat16) == (0, "")
    assert used(plain, torch.float8_e4m3fn) == (3 * sum(t.numel() for t in matrices), "")
    assert used(plain, torch.float8_e4m3fn, fast=True) == (0, "fp8_fast")
    by_comfyui = save_scaled(tmp_path / "marks.safetensors", "marks", **SHAPE)
    assert used(by_comfyui, torch.bfloat16) == (0, "fp8_fast")
    blocks = save_gguf(tmp_path / "x.gguf", tmp_path / "values.safetensors", Type.Q8_0, **SHAPE)
    assert used(blocks, torch.bfloat16) == ((34 / 32 + 2 + UNPACKING) * sum(t.numel() for t in inside), "")


# -- unsupported formats are named


@product(place=["marks", "metadata"], form=["nvfp4", "mxfp8"])
def test_an_unsupported_quantised_layout_is_named(tmp_path: Path, place: str, form: str) -> None:
    path, layer = tmp_path / "x.safetensors", "transformer_blocks.0.ff.net.0.proj"
    tensors, settings = dict(pixart().state_dict()), {"format": form}
    if place == "marks":
        tensors[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
        save_file(tensors, path)
    else:
        save_file(tensors, path, metadata={"_quantization_metadata": json.dumps({"layers": {layer: settings}})})
    assert f"as {form}" in refusal(path, "pixart")
    assert "(float8_e4m3fn, float8_e5m2 are)" in refusal(path, "pixart")


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    for content in (b"", b"x", b"GGUF", b"not a model at all, but long enough"):
        (tmp_path / "x.safetensors").write_bytes(content)
        assert "x.safetensors" in refusal(tmp_path / "x.safetensors")
    (tmp_path / "folder").mkdir()
    assert "the folder folder has no diffusion_pytorch_model.safetensors" in refusal(tmp_path / "folder")
    assert "does not exist" in refusal(tmp_path / "nothing.gguf")


# -- damaged checkpoints


def test_a_truncated_gguf_file_is_refused_with_the_numbers(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "x.gguf", tmp_path / "x.safetensors", Type.Q8_0, **SHAPE)
    whole = path.read_bytes()
    for size in (4, 20, 100, 5000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert str(size) in refusal(path)


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"first": torch.zeros(4), "second": torch.zeros(4)}, path)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"[16,32]", b"[12,28]"))
    assert "tensors first and second overlap" in refusal(path)
    path.write_bytes(raw)
    assert "overlap" not in refusal(path)


def test_an_index_with_a_missing_or_outside_shard_is_refused(tmp_path: Path) -> None:
    folder = save_diffusers(tmp_path / "flux", tmp_path / "single.safetensors", heads=2)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    FAMILIES["comfyui"].inspect(read_header(folder))
    shards[1].rename(folder / "elsewhere")
    assert f"flux lacks the file {shards[1].name} that its index names" in refusal(folder)
    (folder / "elsewhere").rename(shards[1])
    (index,) = folder.glob("*.index.json")
    places = json.loads(index.read_bytes())
    name = next(iter(places["weight_map"]))
    places["weight_map"][name] = "../single.safetensors"
    index.write_text(json.dumps(places))
    assert "outside the folder" in refusal(folder)
    index.write_text("{")
    assert "is damaged" in refusal(folder)


def test_a_missing_or_misshapen_tensor_of_a_diffusers_file_is_named(tmp_path: Path) -> None:
    save_diffusers(tmp_path / "flux", tmp_path / "x.safetensors", heads=1)
    tensors = load_file(tmp_path / "x.safetensors")
    name = "transformer_blocks.0.attn.to_k.weight"
    wrong = [None, torch.ones(5, 128), torch.ones(128, 5), torch.ones(128), torch.ones(128, 128, dtype=torch.int32)]
    for replacement in wrong:
        changed = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(changed if replacement is None else changed | {name: replacement}, tmp_path / "x.safetensors")
        message = refusal(tmp_path / "x.safetensors")
        assert name in message or "double_blocks.0.img_attn.qkv.weight" in message
    save_file(tensors | {f"{name}_scale": torch.ones(())}, tmp_path / "x.safetensors")
    message = refusal(tmp_path / "x.safetensors")
    assert f"holds {name}_scale under diffusers' names" in message


def test_scaled_matrices_are_read_with_their_scales_and_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = write_scaled(tmp_path / "x.safetensors", pixart().state_dict(), "marks")
    part, _ = FAMILIES["pixart"].inspect(read_header(path))
    in_fp8 = {name for name, entry in part.entries.items() if entry.dtype == torch.float8_e4m3fn}
    assert in_fp8
    assert in_fp8 == {name for name, entry in part.entries.items() if entry.scale is not None}
    tensors, layer = load_file(path), "transformer_blocks.0.ff.net.0.proj"
    name = f"{layer}.weight"
    for changed, said in (
        ({f"{name}_scale": torch.ones(3)}, f"the scale of {name} as F32 with the shape [3]"),
        ({name: torch.ones(tensors[name].shape)}, f"holds {name} as F32 with a scale"),
        ({f"{layer}.comfy_quant": torch.zeros(9, dtype=torch.uint8)}, "damaged quantisation settings"),
    ):
        save_file(tensors | changed, path)
        assert said in refusal(path, "pixart")


# -- mutated headers


@dataclass(frozen=True)
class Sample:
    """A checkpoint whose header is to be mutated.

    `write` makes a complete file with a given header. `table` is True for safetensors headers.
    """

    family: str
    header: bytes
    write: Callable[[bytes], Path]
    table: bool = False


def mutate_table(head: bytes, generator: random.Random) -> bytes:
    """Return a readable safetensors header, with tensors of other shapes, dtypes and names than a model's."""
    table = json.loads(head[8:])
    for name in generator.sample([name for name in table if name != "__metadata__"], generator.choice((1, 1, 2))):
        tensor, kind = table[name], generator.randrange(7)
        shape, begin = tensor["shape"], tensor["data_offsets"][0]
        values, layer = math.prod(shape), name.rpartition(".")[0]
        if kind == 0:
            del table[name]
        elif kind == 1:
            table[name.replace("0", generator.choice("1299"))] = table.pop(name)
        elif kind == 2:
            companion = generator.choice(["scale_weight", "weight_scale", "comfy_quant", "weight"])
            table[generator.choice([f"{layer}.{companion}", "scaled_fp8"])] = dict(tensor)
        elif kind == 3:
            tensor["dtype"] = generator.choice(list(STORED))
        elif kind == 4:
            tensor["shape"] = generator.choice(
                [shape[::-1], [values], [1, values], [values, 1], [*shape, 1], [1, *shape]]
            )
        elif kind == 5:
            tensor["shape"] = generator.choice([[], [0], "x", None, [1.5], [-1, -1], [2**63, 0], [[1]]])
        elif shape:
            place = generator.randrange(len(shape))
            shape[place] = generator.choice([0, 1, shape[place] // 2, max(0, shape[place] - 1)])
        if kind in (3, 6):
            tensor["data_offsets"] = [begin, begin + math.prod(shape) * STORED[tensor["dtype"]]]
    raw = json.dumps(table).encode()
    return struct.pack("<Q", len(raw)) + raw


def samples(folder: Path) -> list[Sample]:
    """Return one sample of each kind. Tensors are holes of zeros, except those that say how others are stored."""
    quantised = save_gguf(folder / "x.gguf", folder / "values.safetensors", Type.Q8_0, **SHAPE)
    shards = save_diffusers(folder / "shards", folder / "single.safetensors", heads=1, shard="2MB")
    (index,) = shards.glob("*.index.json")

    def sample(family: str, path: Path, *, marked: bool = False) -> Sample:
        data, table = path.read_bytes(), path.suffix == ".safetensors"
        body = 8 + struct.unpack("<Q", data[:8])[0] if table else data.index(b"final_layer.linear.bias") + 64

        def write(head: bytes) -> Path:
            mutated = folder / f"mutated-{path.name}"
            with mutated.open("wb") as file:
                file.write(head + data[body:] * marked)
                file.truncate(len(head) + len(data) - body)
            return mutated

        return Sample(family, data[:body], write, table)

    def as_index(head: bytes) -> Path:
        index.write_bytes(head)
        return shards

    return [
        sample("comfyui", save_flux(folder / "plain.safetensors", **SHAPE)),
        sample("comfyui", save_scaled(folder / "metadata.safetensors", "metadata", **SHAPE)),
        sample("comfyui", save_scaled(folder / "marks.safetensors", "marks", **SHAPE), marked=True),
        sample("comfyui", quantised),
        sample("cogvideox", save_cogvideox(folder / "cogvideox.safetensors", "2b-odd")),
        sample("pixart", save_model(folder / "pixart.safetensors", pixart().state_dict(), str)),
        Sample("comfyui", index.read_bytes(), as_index),
    ]


def prepare(name: str, path: Path) -> None:
    """Do everything with a header that happens before any tensor is read."""
    family = FAMILIES[name]
    part, config = family.inspect(read_header(path))
    resident_bytes(part, torch.float32)
    blocks = family.shape(config).limits.blocks
    module = family.build(config, Stage(0, blocks, blocks)).module
    shape_parameters(module, part, family.keys(config), torch.float32)


def read_mutated(folder: Path, cases: int, pipe: multiprocessing.connection.Connection) -> None:
    """Read this many mutated checkpoints with little memory, and send the outcomes."""
    torch.set_num_threads(1)
    made = samples(folder)
    size = 1024 * int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    outcomes = {"read": 0, "refused": 0}
    wrong: list[str] = []
    slowest = 0.0
    for case in range(cases):
        generator = random.Random(case)
        sample = made[case % len(made)]
        change = mutate_table if sample.table and generator.random() < 0.7 else mutated
        path = sample.write(change(sample.header, generator))
        started = time.process_time()  # CPU time, as other processes may use the machine
        try:
            prepare(sample.family, path)
            outcomes["read"] += 1
        except Refused as refused:
            outcomes["refused"] += 1
            if "\n" in str(refused) or not str(refused).endswith("."):
                wrong.append(f"{case} {path.name}: {refused}")
        except BaseException as error:
            wrong.append(f"{case} {path.name}: {error!r}")
        slowest = max(slowest, time.process_time() - started)
    pipe.send((outcomes, wrong, slowest))


def test_mutated_headers_are_refused_or_read_but_never_crash(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    cases = ALL_CASES if request.config.getoption("--all") else QUICK_CASES
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=read_mutated, args=(tmp_path, cases, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(240), "hung"
        outcomes, wrong, slowest = ours.recv()
    finally:
        process.kill()
        process.join()
    assert wrong == []
    assert sum(outcomes.values()) == cases
    assert min(outcomes.values()) > cases / 20
    assert slowest < SECONDS
    print(outcomes, f"the slowest took {slowest:.2f} s")

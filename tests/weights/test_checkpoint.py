import contextlib
import json
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from parallel_backend.errors import Refused
from parallel_backend.models.family import Stage
from parallel_backend.models.flux import FluxFamily
from parallel_backend.weights.checkpoint import PIECE_BYTES, CheckpointReader, read_header
from parallel_backend.weights.layers import materialise
from parallel_backend.weights.loader import load_weights
from tests.tiny_flux import flux_tensors, save_flux


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save_flux(tmp_path / "flux.safetensors", heads=1, single_blocks=1)


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(6, 5), "b": torch.randn(4, 3).bfloat16(), "c": torch.arange(7)}
    save_file(tensors, tmp_path / "x.safetensors")
    counted = []
    with CheckpointReader(read_header(tmp_path / "x.safetensors"), counted.append) as reader:
        for name, rows in (("a", slice(1, 4)), ("b", slice(0, 4)), ("c", slice(6, 7))):
            expected = tensors[name][rows]
            into = torch.empty(expected.shape, dtype=torch.float32)
            reader.read_rows(name, rows, into)
            assert torch.equal(into, expected.float())
    assert sum(counted) == 3 * 5 * 4 + 4 * 3 * 2 + 8


def test_a_large_tensor_is_read_in_bounded_pieces(tmp_path: Path) -> None:
    big = torch.arange(PIECE_BYTES // 4 + 1000, dtype=torch.int32).view(-1, 8)
    save_file({"big": big}, tmp_path / "x.safetensors")
    counted, into = [], torch.empty_like(big)
    with CheckpointReader(read_header(tmp_path / "x.safetensors"), counted.append) as reader:
        reader.read_rows("big", slice(0, len(big)), into)
    assert counted == [PIECE_BYTES, 4000]
    assert torch.equal(into, big)


@pytest.mark.parametrize("guidance", [False, True])
def test_the_flux_key_map_uses_every_row_of_the_file_once_and_fills_every_parameter(
    tmp_path: Path, guidance: bool
) -> None:
    path = save_flux(tmp_path / "flux.safetensors", heads=2, double_blocks=2, single_blocks=3, guidance=guidance)
    family = FluxFamily()
    part, config = family.inspect(read_header(path))
    keys = family.keys(config)
    used = sorted((piece.name, piece.start, piece.stop) for pieces in keys.values() for piece in pieces)
    for name, entry in part.entries.items():
        rows = [(start, stop) for used_name, start, stop in used if used_name == name]
        assert rows[0][0] == 0, name
        assert rows[-1][1] == entry.shape[0], name
        assert all(stop == start for (_, stop), (start, _) in pairwise(rows)), name

    model = family.build(config, Stage(0, 5, 5))
    materialise(model.module, torch.float32, torch.device("cpu"))
    for parameter in model.module.parameters():
        parameter.fill_(float("nan"))
    load_weights(model.module, part, keys, lambda _: None)
    tensors = flux_tensors(heads=2, double_blocks=2, single_blocks=3, guidance=guidance)
    parameters = dict(model.module.named_parameters())
    assert not any(parameter.isnan().any() for parameter in parameters.values())
    assert sum(p.double().sum() for p in parameters.values()).item() == pytest.approx(
        sum(t.double().sum() for t in tensors.values()).item()
    )


def test_a_stage_reads_only_its_blocks(tmp_path: Path) -> None:
    path = save_flux(tmp_path / "flux.safetensors", heads=2, double_blocks=2, single_blocks=3)
    family = FluxFamily()
    part, config = family.inspect(read_header(path))
    read = []
    for stage in (Stage(0, 2, 5), Stage(2, 4, 5), Stage(4, 5, 5)):
        model = family.build(config, stage)
        materialise(model.module, torch.float32, torch.device("cpu"))
        counted: list[int] = []
        load_weights(model.module, part, family.keys(config), counted.append)
        held = sum(parameter.nbytes for parameter in model.module.parameters())
        assert sum(counted) == held
        read.append(held)
    shared = sum(e.nbytes for name, e in part.entries.items() if name.startswith(("time_in", "vector_in")))
    assert sum(read) == sum(entry.nbytes for entry in part.entries.values()) + 2 * shared


def test_a_truncated_file_is_refused_with_the_numbers(file: Path) -> None:
    whole = file.read_bytes()
    for size in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(Refused, match=str(size)):
            read_header(file)


def test_a_file_that_ends_while_it_is_read_is_an_error(file: Path) -> None:
    checkpoint = read_header(file)
    last = max(checkpoint.entries, key=lambda name: checkpoint.entries[name].offset)
    shape = checkpoint.entries[last].shape
    with CheckpointReader(checkpoint, lambda _: None) as reader:
        file.write_bytes(file.read_bytes()[:-8])
        with pytest.raises(OSError, match="ended at byte"):
            reader.read_rows(last, slice(0, shape[0]), torch.empty(shape))


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_headers_are_refused_or_read_but_never_crash(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    head = bytearray(whole[: 8 + length])
    for _ in range(data.draw(st.integers(1, 5))):
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    damaged = file.with_name("damaged.safetensors")
    damaged.write_bytes(head)
    with damaged.open("r+b") as handle:
        handle.truncate(len(whole))
    with contextlib.suppress(Refused):
        FluxFamily().inspect(read_header(damaged))


def test_a_shape_that_contradicts_the_data_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(Refused, match="8 bytes for 16"):
        read_header(path)

"""Headers and byte ranges of checkpoint files. Files that are damaged, truncated or of no model are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from parallel_backend.comm.meter import Meter
from parallel_backend.errors import Refused
from parallel_backend.models.comfyui.comfy_family import ComfyFamily
from parallel_backend.models.comfyui.meta_model import load_buffers
from parallel_backend.models.family import Stage
from parallel_backend.weights.files.checkpoint import Checkpoint, read_header
from parallel_backend.weights.layers.packing import shape_parameters
from parallel_backend.weights.loading import rounds
from parallel_backend.weights.loading.loader import WeightSource, load_weights, want_of
from parallel_backend.weights.loading.reading import Neighbours, WantedRange, read_ranges
from parallel_backend.weights.loading.rounds import CHUNK_BYTES, Way
from parallel_backend.weights.stores.replicated import ReplicatedStore
from tests.support.comfy_oracle import comfy_on_path
from tests.support.rank_parts import everyone, neighbours, watch
from tests.support.ranks import run_ranks
from tests.support.selection import thorough
from tests.support.tiny.flux import save_flux

comfy_on_path()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save_flux(tmp_path / "flux.safetensors", heads=1, single_blocks=1)


def test_an_empty_buffer_is_a_marker_and_needs_no_values() -> None:
    module = nn.Module()
    module.register_buffer("__x0__", torch.tensor([]))
    module.register_buffer("positions", torch.ones(2))
    load_buffers(module, {"__x0__", "positions"})
    assert module.state_dict().keys() == {"__x0__", "positions"}
    assert [name for name, _ in module.named_parameters()] == ["positions"]


def read(checkpoint: Checkpoint, rows_of: dict[str, slice]) -> tuple[dict[str, Tensor], list[int]]:
    """Return rows of tensors, and the number of bytes of each read."""
    found, counted, wants = {}, [], []
    for name, rows in rows_of.items():
        entry = checkpoint.entries[name]
        found[name] = torch.empty(rows.stop - rows.start, *entry.shape[1:], dtype=entry.dtype)
        width = found[name][0].numel()
        wants.append(want_of(entry, rows.start * width, found[name].view(-1), None, {entry.file: 0}))
    read_ranges(checkpoint.files, wants, neighbours(), watch(counted.append))
    return found, counted


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(6, 5), "b": torch.randn(4, 3).bfloat16(), "c": torch.arange(7)}
    save_file(tensors, tmp_path / "x.safetensors")
    chosen = {"a": slice(1, 4), "b": slice(0, 4), "c": slice(6, 7)}
    found, counted = read(read_header(tmp_path / "x.safetensors"), chosen)
    for name, rows in chosen.items():
        assert torch.equal(found[name], tensors[name][rows])
    assert sum(counted) == 3 * 5 * 4 + 4 * 3 * 2 + 8


def test_a_large_tensor_is_read_in_bounded_pieces(tmp_path: Path) -> None:
    big = torch.arange(CHUNK_BYTES // 4 + 1000, dtype=torch.int32).view(-1, 8)
    save_file({"big": big}, tmp_path / "x.safetensors")
    found, counted = read(read_header(tmp_path / "x.safetensors"), {"big": slice(0, len(big))})
    assert counted == [CHUNK_BYTES, 4000]
    assert torch.equal(found["big"], big)


@pytest.mark.parametrize(
    ("way", "linked"),
    [(None, False), (None, True), *(pytest.param(way, way is Way.LINKED, marks=thorough) for way in Way)],
)
def test_bytes_that_several_ranks_need_are_sent_by_one_reader_or_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way | None, linked: bool
) -> None:
    """Two machines take part: ranks 0 to 2 on one need all bytes or the last ones, rank 3 on the other the first ones."""
    monkeypatch.setattr(rounds, "CHUNK_BYTES", 1000)
    file = tmp_path / "bytes"
    whole = torch.randint(256, (20_500,), dtype=torch.uint8)
    file.write_bytes(whole.numpy().tobytes())
    parts = [(0, 20_500), (0, 20_500), (9_700, 20_500), (0, 5_500)]

    def on(rank: int) -> tuple[bool, int, int]:
        (start, stop), counted, meter = parts[rank], [], Meter()
        found = torch.zeros(stop - start, dtype=torch.uint8)

        def put(offset: int, data: Tensor) -> None:
            found[offset : offset + len(data)] = data

        ranks = Neighbours(everyone("wants", meter), (0, 0, 0, 1), everyone("links", meter) if linked else None)
        read_ranges([file], [WantedRange(0, start, stop, put)], ranks, watch(counted.append), way)
        return torch.equal(found, whole[start:stop]), sum(counted), meter.sent["loading"]

    right, counted, sent = zip(*run_ranks(4, on), strict=True)
    assert all(right)
    assert (sum(counted[:3]), counted[3]) == (20_500, 5_500)
    shared = 20_500 + 10_800
    assert sum(sent) == {Way.AGAIN: 0, Way.SENT: shared, Way.LINKED: shared}.get(way, sum(sent))
    if way is None:
        assert 0 < sum(sent) <= shared


def test_a_stage_reads_only_its_blocks(tmp_path: Path) -> None:
    family = ComfyFamily()
    part, config = family.inspect(
        read_header(save_flux(tmp_path / "flux.safetensors", heads=2, double_blocks=2, single_blocks=3))
    )
    keys, read = family.keys(config), []
    for stage in (Stage(0, 2, 5), Stage(2, 4, 5), Stage(4, 5, 5)):
        module, counted = family.build(config, stage).module, []
        shape_parameters(module, part, keys, torch.float32)
        module.to_empty(device="cpu")
        source = WeightSource(part, keys, torch.float32)
        load_weights(module, ReplicatedStore(module), source, neighbours(), watch(counted.append))
        assert sum(counted) == sum(parameter.nbytes for parameter in module.parameters())
        read.append(sum(counted))
    shared = sum(
        e.nbytes for name, e in part.entries.items() if name.startswith(("time_in", "vector_in", "img_in", "txt_in"))
    )
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
    rows = slice(0, checkpoint.entries[last].shape[0])
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(Refused, match="ended at byte"):
        read(checkpoint, {last: rows})


def test_a_read_error_names_the_byte_and_keeps_what_was_read() -> None:
    """This process's memory serves as the file: the kernel reads mapped addresses, and fails with EIO at unmapped ones."""
    held = torch.arange(64, dtype=torch.uint8)
    found = torch.zeros(64, dtype=torch.uint8)
    nowhere = 1 << 47
    wants = [
        WantedRange(0, held.data_ptr(), held.data_ptr() + 64, lambda offset, data: found.copy_(data)),
        WantedRange(0, nowhere, nowhere + 64, lambda offset, data: None),
    ]
    with pytest.raises(Refused, match=rf"mem cannot be read at byte {nowhere} \(Input/output error\)"):
        read_ranges([Path("/proc/self/mem")], wants, neighbours(), watch())
    assert torch.equal(found, held)

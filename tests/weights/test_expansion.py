"""GGUF's weights expanded by one kernel, with the bits of eager operations, and kept if there is memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn

from parallel_backend.models.comfyui.proof.rank import CPU, ProofRank, plan_for
from parallel_backend.models.comfyui.small import small
from parallel_backend.weights.formats import BLOCK_TYPES, Storage
from parallel_backend.weights.layers.cast import pack
from parallel_backend.weights.layers.expansion import Expansion, expand_by
from tests.models.parallel_models import TOLERANCE, worst
from tests.support.ranks import run_ranks
from tests.support.selection import thorough
from tests.support.tiny.formats import HALVES, random_blocks

PATCHES = 3
WIDTH = 512
SIZES = (96, 1, 50, 7)
"""Numbers of rows: one kernel must accept all of them."""
KERNELS = [
    *((kind, torch.bfloat16) for kind in HALVES),
    (Type.Q4_K, torch.float16),
    *((kind, torch.float32) for kind in (Type.Q4_K, Type.Q6_K)),
]
"""Pairs of a GGUF type and the dtype of the expanded values."""
PATIENCE = 600
"""Seconds to wait for a compiler on a busy machine."""


class Counting(Expansion):
    """An expansion that counts the expansions of each weight."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__(fused)
        self.times: Counter[int] = Counter()

    def expand(self, storage: Storage, rows: Tensor, dtype: torch.dtype) -> Tensor:
        self.times[rows.data_ptr()] += 1
        return super().expand(storage, rows, dtype)


class Doubled(nn.Module):
    """A stand-in for an adapter's change of a weight's values."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.mul_(2)


def hold(layer: nn.Linear, rows: Tensor, kind: Type) -> None:
    """Make a layer hold its weight as these rows of blocks."""
    pack(layer, BLOCK_TYPES[kind], scaled=False)
    layer.weight = nn.Parameter(rows, requires_grad=False)


def layers_of(kinds: Sequence[Type]) -> nn.ModuleList:
    layers = nn.ModuleList(nn.Linear(WIDTH, 96, bias=False, device="meta") for _ in kinds)
    for layer, kind in zip(layers, kinds, strict=True):
        hold(layer, torch.from_numpy(random_blocks(kind, 96, WIDTH, seed=1)), kind)
    return layers


def test_expanded_weights_are_kept_within_the_context_as_far_as_room_allows() -> None:
    layers, expansion, x = layers_of([Type.Q8_0, Type.Q4_K, Type.Q6_K]), Counting(), torch.ones(2, WIDTH)
    expected = [layer(x) for layer in layers]
    expand_by(layers, expansion)
    for room, times in [(0, 3), (2 * 96 * WIDTH * 4, 1)]:
        expansion.times.clear()
        with expansion.keeping(room):
            for _ in range(3):
                assert all(torch.equal(layer(x), given) for layer, given in zip(layers, expected, strict=True))
        assert sorted(expansion.times.values()) == [*[times] * 2, 3], "room is for two of them"
    layers[0].change = Doubled()  # adapters change between requests
    with expansion.keeping(1 << 30):
        for _ in range(2):
            assert torch.equal(layers[0](x), 2 * expected[0])
            assert torch.equal(layers[1](x), expected[1])
    layers[0].change = None
    with expansion.keeping(1 << 30):
        assert torch.equal(layers[0](x), expected[0])


def test_patches_of_stages_expand_each_weight_once() -> None:
    """The result equals that of ComfyUI's forward on the expanded values, with the same bits with and without room."""
    with torch.no_grad():
        case = small("flux")
        stored: dict[str, Tensor] = {}
        for name, layer in case.model.named_modules():
            if "_blocks." in name and isinstance(layer, nn.Linear) and layer.in_features % 32 == 0:
                blocks = gguf.quantize(layer.weight.numpy(), Type.Q8_0)
                stored[name] = torch.from_numpy(blocks)
                layer.weight.copy_(torch.from_numpy(gguf.dequantize(blocks, Type.Q8_0)))
        expected = case.stock()
    plan = plan_for(case, pipefusion=2, patches=PATCHES)

    def on_rank(_: int) -> tuple[list[list[Tensor]], list[Counter[int]]]:
        rank, expansion = ProofRank(case, plan), Counting()
        for name, layer in rank.module.named_modules():
            if name in stored and isinstance(layer, nn.Linear):
                hold(layer, stored[name], Type.Q8_0)
        expand_by(rank.module, expansion)
        outs, times = [], []
        for room in (0, sum(blocks.numel() for blocks in stored.values()), 1 << 30):  # a quarter of both stages' values
            expansion.times.clear()
            with expansion.keeping(room):
                found = [rank.run(), rank.by_patch(), rank.by_patch()]
            outs.append([out for out in found if out is not None])
            times.append(expansion.times.copy())
        return outs, times

    ranks = run_ranks(plan.world_size, on_rank)
    for outs, (without, some, all_kept) in ranks:
        for found in outs:
            assert all(torch.equal(one, other) for one, other in zip(found, outs[0], strict=True))
        assert max(without.values()) == 1 + 2 * PATCHES, "once for the whole call, and once for each patch of two"
        assert set(all_kept.values()) == {1}
        assert all_kept.total() < some.total() < without.total()
        assert without.keys() == all_kept.keys()
    assert worst([outs[0] for outs, _ in ranks], expected) <= TOLERANCE


@torch.inference_mode()
def compiled(_: int) -> list[tuple[str, torch.dtype, bool, int, int]]:
    """Return for each kernel: its type and dtype, True if its bits equal those of eager operations, and numbers of kernels and
    graphs.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    found = []
    for kind, dtype in KERNELS:
        layers, expansion = layers_of([kind]), Expansion(fused=True)
        expand_by(layers, expansion)
        counters.clear()
        metrics.reset()
        for _ in range(2):
            expansion.make_kernels(layers, dtype, CPU)
        assert expansion.warnings() == ()
        storage, rows = BLOCK_TYPES[kind], layers[0].weight
        equal = all(
            torch.equal(expansion.expand(storage, rows[:size], dtype), storage.expand(rows[:size], dtype))
            for size in SIZES
        )
        found.append((kind.name, dtype, equal, metrics.generated_kernel_count, counters["stats"]["unique_graphs"]))
    return found


@thorough
def test_one_kernel_of_each_type_has_the_bits_of_eager_operations_for_any_size() -> None:
    (found,) = run_ranks(1, compiled, PATIENCE)
    assert [each[:3] for each in found] == [(kind.name, dtype, True) for kind, dtype in KERNELS]
    for name, dtype, _, kernels, graphs in found:
        most = 2 if dtype == torch.float32 else 1  # on CPUs the compiler copies Q4_K's fp32 once more
        assert kernels <= most, name
        assert graphs == 1, name


@thorough
def test_without_a_compiler_eager_operations_expand_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def in_a_process(_: int) -> tuple[str, ...]:
        layers, expansion, x = layers_of([Type.Q8_0, Type.Q4_K]), Expansion(fused=True), torch.ones(2, WIDTH)
        expected = [layer(x) for layer in layers]
        expand_by(layers, expansion)
        for _ in range(2):
            expansion.make_kernels(layers, torch.float32, CPU)
            assert all(torch.equal(layer(x), given) for layer, given in zip(layers, expected, strict=True))
        return (*expansion.warnings(), *expansion.warnings())

    ((said,),) = run_ranks(1, in_a_process, PATIENCE)
    assert said.startswith("GGUF weights are expanded without a compiler, which takes longer: ")
    assert "\n" not in said

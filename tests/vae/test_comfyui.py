"""ComfyUI's own autoencoders over the rows of several ranks, against the same modules on one rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_backend.errors import Cancelled, Refused
from parallel_backend.models.comfyui.autoencoder import noise_scale, with_noise
from parallel_backend.vae import recognise
from parallel_backend.vae.comfyui import ComfyAutoencoder
from parallel_backend.vae.row_rules import RULES
from parallel_backend.vae.row_tensor import RowTensor
from parallel_backend.vae.rows import Slab, slab_of
from parallel_backend.weights.files.checkpoint import read_header
from tests.support.allocations import peak_bytes
from tests.support.latents import relative_error
from tests.support.rank_parts import everyone
from tests.support.ranks import run_ranks
from tests.support.selection import thorough
from tests.support.tiny.vae import decoded, encoded
from tests.vae.comfy_vaes import KINDS, NOISE_INSIDE, build, drawn, save_comfy_vae

TOLERANCE = 1e-5
SEED = 11

GATHERS = {"flux2": 1}
"""Numbers of pictures that one decode and one encode gather whole: FLUX.2 normalises its finished latent."""

SMALL = [(2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (2, 3, 1), (1, 5, 3)]
"""Frames (of a video), heights and widths of latents: with fewer rows than ranks, with a dimension of size 1, and a picture.

Two frames are the fewest of which later frames make more frames than the first.
"""

QUICK = ("wan", "flux2", "ltx095")
"""Kinds whose code no other kind shares: videos, a picture whose latent is normalised at its end, and noise in the decoder.
test_decodes_and_encodes_over_ranks_equal_comfyuis has every kind.
"""

Results = dict[str, tuple[Tensor, Tensor, int]]

Outcome = Tensor | str
"""A function's result, or the message that it raised."""


def mixed(module: nn.Module, latent: Tensor) -> Tensor:
    """Return the latent with the noise that ComfyUI's own decoder would draw."""
    torch.manual_seed(SEED)
    scale = noise_scale(module)
    return with_noise(latent, scale) if scale else latent


@cache
def over_ranks(ranks: int) -> Results:
    """Return the first rank's decoded and encoded tensors of each kind, and the number of gathered pictures."""
    modules = {name: build(name) for name in KINDS}  # built before the ranks fork, so that they need no import

    def work(rank: int) -> Results:
        axis, gathered = everyone("rows"), [0]
        whole = RowTensor.whole

        def counted(x: RowTensor) -> Tensor:
            gathered[0] += 1
            return whole(x)

        RowTensor.whole = counted  # type: ignore[method-assign]
        results = {}
        for name, module in modules.items():
            scale = KINDS[name].scale
            ours, (latent, pixels) = ComfyAutoencoder(module, scale), drawn(KINDS[name])
            before = gathered[0]
            with torch.inference_mode():  # as in a worker
                latent = mixed(module, latent)
                clip = decoded(ours, slab_of(latent, axis))
                made = encoded(ours, slab_of(pixels, axis, scale))
            results[name] = clip, made, gathered[0] - before
        return results

    return run_ranks(ranks, work)[0]


@cache
def oracle(name: str) -> tuple[Tensor, Tensor]:
    module, (latent, pixels) = build(name), drawn(KINDS[name])
    torch.manual_seed(SEED)
    with torch.inference_mode():
        return module.decode(latent), module.encode(pixels)


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=thorough) for ranks in (2, 4, 6))])
@pytest.mark.parametrize("name", KINDS)
def test_decodes_and_encodes_over_ranks_equal_comfyuis(name: str, ranks: int) -> None:
    """Rows are uneven; a latent with fewer rows than ranks stays whole."""
    *made, gathers = over_ranks(ranks)[name]
    for ours, theirs in zip(made, oracle(name), strict=True):
        assert relative_error(ours, theirs) <= TOLERANCE
    assert gathers == (GATHERS.get(name, 0) if KINDS[name].latent[-2] >= ranks else 0)


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=thorough)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[thorough] * (name not in QUICK)) for name in KINDS])
def test_latents_of_a_few_rows_equal_comfyuis(name: str, ranks: int) -> None:
    """Some latents have one row, or fewer rows than ranks. If ComfyUI's own code raises, all ranks raise the same."""
    module, kind = build(name), KINDS[name]
    small = [drawn(kind.sized(*size)) for size in SMALL]

    def work(rank: int) -> list[Outcome]:
        axis, ours = everyone("rows"), ComfyAutoencoder(module, kind.scale)
        outcomes = []
        for latent, pixels in small:
            outcomes.append(outcome(lambda x: decoded(ours, slab_of(mixed(module, x), axis)), latent))
            outcomes.append(outcome(lambda x: encoded(ours, slab_of(x, axis, kind.scale)), pixels))
        return outcomes

    theirs: list[Outcome] = []
    for latent, pixels in small:
        torch.manual_seed(SEED)
        theirs += [outcome(module.decode, latent), outcome(module.encode, pixels)]  # type: ignore[arg-type]
    first, *others = run_ranks(ranks, work)
    for index, (our, their) in enumerate(zip(first, theirs, strict=True)):
        if isinstance(their, str):
            assert [each[index] for each in (first, *others)] == [their] * ranks
            continue
        assert isinstance(our, Tensor), our
        assert relative_error(our, their) <= TOLERANCE
    assert sum(isinstance(each, Tensor) for each in first) >= len(SMALL)


def outcome(function: Callable[[Tensor], Tensor], values: Tensor) -> Outcome:
    """Return a function's result for a tensor, or the first line of its error."""
    try:
        with torch.inference_mode():
            return function(values)
    except (RuntimeError, AttributeError) as error:
        return str(error).splitlines()[0]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[thorough] * (name not in QUICK)) for name in KINDS])
def test_one_rank_gives_the_same_bits(name: str) -> None:
    ours, (latent, pixels) = ComfyAutoencoder(build(name), KINDS[name].scale), drawn(KINDS[name])
    with torch.inference_mode():
        latent = mixed(ours.module, latent)
        clip = decoded(ours, slab_of(latent, everyone("rows")))
        made = encoded(ours, slab_of(pixels, everyone("rows"), KINDS[name].scale))
    assert all(map(torch.equal, (clip, made), oracle(name)))


@pytest.mark.parametrize("name", ["wan", *(pytest.param(name, marks=thorough) for name in ("flux", "hunyuan15"))])
def test_peak_memory_falls_with_the_number_of_ranks(name: str) -> None:
    height = 16
    latent, module = torch.empty(KINDS[name].sized(3, height, 1).latent).normal_(), build(name)

    def peak(ranks: int) -> int:
        def work(rank: int) -> int:
            ours = ComfyAutoencoder(module, KINDS[name].scale)
            slab = slab_of(latent, everyone("rows"))
            with torch.inference_mode():
                return peak_bytes(lambda: ours.decode(slab, "", lambda: None, lambda piece: None))

        return max(run_ranks(ranks, work))

    rows = height // 2
    assert peak(2) <= peak(1) / 2 * (rows + 2) / rows  # a halo of one latent row on either side is the smallest


@pytest.mark.parametrize(
    "name",
    ["wan", *(pytest.param(name, marks=thorough) for name in ("wan22", "hunyuan", "hunyuan15", "ltx", "ltx095"))],
)
def test_frames_arrive_while_later_ones_are_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A video of twice the frames takes no more memory. Ending a decode after its first frames does not spoil the next one."""
    module, kind = build(name), KINDS[name]
    for limit in ("MIN_CHUNK_SIZE", "MAX_CHUNK_SIZE"):  # of LTX-Video, which decodes small videos at once
        monkeypatch.setattr(sys.modules[type(module).__module__], limit, 1 << 16, raising=False)
    ours, layers = ComfyAutoencoder(module, kind.scale), 0
    come: list[tuple[int, Tensor]] = []

    def clip(frames: int) -> Tensor:
        return torch.randn(*kind.latent[:2], frames, *kind.latent[3:], generator=torch.Generator().manual_seed(frames))

    def peak(frames: int) -> int:
        slab = slab_of(clip(frames), everyone("rows"))
        return peak_bytes(lambda: ours.decode(slab, "", lambda: None, lambda piece: None))

    def mark() -> None:
        nonlocal layers
        layers += 1

    def end(_: Slab) -> None:
        raise Cancelled

    with torch.inference_mode():
        growth = peak(9) - peak(5)
        slab = slab_of(mixed(module, clip(9)), everyone("rows"))
        with pytest.raises(Cancelled):
            ours.decode(slab, "", lambda: None, end)
        ours.decode(slab, "", mark, lambda piece: come.append((layers, piece.whole())))
        torch.manual_seed(SEED)
        theirs = module.decode(clip(9))  # type: ignore[operator]
    assert torch.equal(torch.cat([piece for _, piece in come], 2), theirs)
    done = [count for count, _ in come]
    assert len(set(done)) > 3 and done[0] < layers / 2
    assert growth < theirs[:, :, : 4 * kind.frames].nbytes / 4


def test_random_numbers_for_a_distributed_tensor_are_refused() -> None:
    with torch.inference_mode():
        picture = RowTensor.of(slab_of(torch.zeros(1, 3, 4, 4), everyone("rows")), RULES)
        with pytest.raises(AssertionError, match="random"):
            torch.randn_like(picture)


@pytest.mark.parametrize("frames", [pytest.param(1, marks=thorough), 4])
@pytest.mark.parametrize("name", ["ltx095", pytest.param("ltx", marks=thorough), pytest.param("ltx2", marks=thorough)])
def test_ltx_decoded_in_small_pieces_equals_comfyuis(name: str, frames: int) -> None:
    """A few frames at a time pass the rest of the decoder. Ranks with different memory agree on their number."""
    module, kind = build(name), KINDS[name]
    code = sys.modules[type(module).__module__]
    latent = torch.randn(1, 128, frames, 5, 2, generator=torch.Generator().manual_seed(frames))

    def work(rank: int) -> tuple[Tensor, int]:
        code.MIN_CHUNK_SIZE = code.MAX_CHUNK_SIZE = 1 << (16 + rank)  # type: ignore[attr-defined]
        ours, pieces = ComfyAutoencoder(module, kind.scale), [0]

        def count(*_: Any) -> None:
            pieces[0] += 1

        module.decoder.conv_out.register_forward_hook(count)  # type: ignore[union-attr, operator]
        with torch.inference_mode():
            slab = slab_of(mixed(module, latent), everyone("rows"))
            return decoded(ours, slab), pieces[0]

    ours, pieces = run_ranks(3, work)[0]
    assert (pieces > 1) == (frames > 1)
    torch.manual_seed(SEED)
    with torch.inference_mode():
        theirs = module.decode(latent)  # type: ignore[operator]
    assert relative_error(ours, theirs) <= TOLERANCE


def test_noise_inside_a_decoder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ltx091.safetensors"
    save_comfy_vae(file, "ltx095", **NOISE_INSIDE)
    with pytest.raises(
        Refused, match=r"ltx091.safetensors holds an LTX-Video VAE of version 0\.9\.1, .*: use Load VAE\.$"
    ):
        recognise(read_header(file))

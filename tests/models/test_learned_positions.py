"""CogVideoX-5b image to video has learned positions: its tokens, against diffusers' patch embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallel_backend.errors import Refused
from parallel_backend.layout import TokenLayout, cut
from parallel_backend.models.cogvideox import CogVideoXFamily
from parallel_backend.models.family import Stage
from parallel_backend.weights.checkpoint import read_header
from tests.tiny_cogvideox import TEXT_WIDTH, cogvideox, save_cogvideox
from tests.tiny_models import draw

LEARNED = {"use_learned_positional_embeddings": True, "num_layers": 1}
TEXT, HEIGHT, WIDTH = 226, 60, 90


@pytest.mark.parametrize("frames", [13, 2])
def test_tokens_have_the_positions_of_diffusers(tmp_path: Path, frames: int) -> None:
    theirs = cogvideox("5b-i2v", **LEARNED)
    positions = theirs.patch_embed.pos_embedding
    positions.copy_(draw(*positions.shape, seed=7))
    family = CogVideoXFamily()
    _, config = family.inspect(read_header(save_cogvideox(tmp_path / "i2v.safetensors", "5b-i2v", **LEARNED)))
    assert config.learned_positions == positions.shape[1]
    ours = family.build(config, Stage(0, 1, 1))
    ours.module.to_empty(device="cpu").load_state_dict(theirs.state_dict())

    noise, image = (draw(1, 16, frames, HEIGHT, WIDTH, seed=seed) for seed in (1, 2))
    conditioning = {"context": draw(1, TEXT, TEXT_WIDTH, seed=3), "concat": image}
    family.check(config, noise, conditioning, {})
    expected = theirs.patch_embed(conditioning["context"], torch.cat([noise, image], dim=1).transpose(1, 2))[0]
    rows, columns = HEIGHT // 2, WIDTH // 2
    by_rows = expected[TEXT:].view(frames, rows, columns, -1).transpose(0, 1).flatten(0, 2)

    tokens = frames * rows * columns
    layout = TokenLayout(TEXT, tuple(cut(tokens, 2)), heads=48, ring=1, ulysses=3)
    runs = [ours.embed(noise, conditioning, layout, rank)[0] for rank in range(3)]
    text = torch.cat([run[: layout.text(rank).stop - layout.text(rank).start] for rank, run in enumerate(runs)])
    torch.testing.assert_close(text, expected[:TEXT])
    for rank, run in enumerate(runs):
        wanted = torch.cat([by_rows[part] for part in layout.image(rank)])
        torch.testing.assert_close(run[-len(wanted) :], wanted)


def test_another_size_is_refused(tmp_path: Path) -> None:
    family = CogVideoXFamily()
    _, config = family.inspect(read_header(save_cogvideox(tmp_path / "i2v.safetensors", "5b-i2v", **LEARNED)))
    latent = torch.zeros(1, 16, 13, HEIGHT, 80)
    with pytest.raises(
        Refused, match=r"the latent is 80 x 60 and CogVideoX-5b image to video takes 90 x 60 only \(720 x"
    ):
        family.check(config, latent, {"context": torch.zeros(1, TEXT, TEXT_WIDTH), "concat": latent}, {})

"""CogVideoX-5b image to video has learned positions. Its tokens equal those of diffusers' own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_backend.errors import Refused
from parallel_backend.models.diffusers.cogvideox import CogVideoXFamily
from parallel_backend.models.diffusers.cogvideox_positions import positions_for
from parallel_backend.models.family import Stage
from parallel_backend.weights.files.checkpoint import read_header
from tests.support.selection import thorough
from tests.support.tiny.cogvideox import TEXT_WIDTH, cogvideox, save_cogvideox
from tests.support.tiny.models import draw

LEARNED = {"use_learned_positional_embeddings": True, "num_layers": 1}
TEXT, HEIGHT, WIDTH = 226, 60, 90


@pytest.fixture(scope="module")
def theirs() -> Any:
    """Return diffusers' model."""
    model = cogvideox("5b-i2v", **LEARNED)
    model.patch_embed.pos_embedding.copy_(draw(*model.patch_embed.pos_embedding.shape, seed=7))
    return model


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a model with learned positions."""
    return save_cogvideox(tmp_path_factory.mktemp("learned") / "i2v.safetensors", "5b-i2v", **LEARNED)


@pytest.fixture(scope="module")
def embed(file: Path, theirs: Any) -> Any:
    """Return our module that makes tokens, with the weights of diffusers' model."""
    family = CogVideoXFamily()
    _, config = family.inspect(read_header(file))
    assert config.learned_positions == theirs.patch_embed.pos_embedding.shape[1]
    module: Any = family.build(config, Stage(0, 1, 1)).module
    module.to_empty(device="cpu").load_state_dict(theirs.state_dict())
    return module.patch_embed


@pytest.mark.parametrize("frames", [13, 2])
def test_tokens_equal_those_of_diffusers(theirs: Any, embed: Any, frames: int) -> None:
    x, text = draw(1, frames, 32, HEIGHT, WIDTH, seed=1), draw(1, TEXT, TEXT_WIDTH, seed=3)
    with positions_for(embed, TEXT):
        torch.testing.assert_close(embed(text, x), theirs.patch_embed(text, x))


@pytest.mark.parametrize(
    ("frames", "tokens"),
    [(13, 230), (1, 5), *(pytest.param(*size, marks=thorough) for size in ((13, 5), (1, 230)))],
)
def test_text_of_another_length_has_the_first_positions_and_zeros_after_them(
    embed: Any, frames: int, tokens: int
) -> None:
    x, text = torch.zeros(1, frames, 32, HEIGHT, WIDTH), draw(1, TEXT + 4, TEXT_WIDTH, seed=3)

    def positions(count: int) -> Tensor:
        with positions_for(embed, count):
            return embed(text[:, :count], x)[0] - torch.cat([embed.text_proj(text[0, :count]), of_nothing])

    of_nothing = embed.proj.bias.expand(frames * HEIGHT * WIDTH // 4, -1)
    whole, found = positions(TEXT), positions(tokens)
    torch.testing.assert_close(found[tokens:], whole[TEXT:])
    common = min(tokens, TEXT)
    torch.testing.assert_close(found[:common], whole[:common])
    torch.testing.assert_close(found[common:tokens], torch.zeros_like(found[common:tokens]), rtol=0, atol=1e-5)
    assert "pos_embedding" not in vars(embed), "nothing is kept"


def test_another_latent_size_is_refused(file: Path) -> None:
    family = CogVideoXFamily()
    _, config = family.inspect(read_header(file))
    latent = torch.zeros(1, 16, 13, HEIGHT, 80)
    with pytest.raises(
        Refused, match=r"the latent is 80 x 60 and CogVideoX-5b image to video takes 90 x 60 only \(720 x"
    ):
        family.check(config, latent, {"context": torch.zeros(1, TEXT, TEXT_WIDTH), "concat": latent}, {})

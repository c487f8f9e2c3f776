"""The VAE that nodes see: modules and statistics equal ComfyUI's own, copies share its weights, and changes are refused."""

from __future__ import annotations

import copy
import gc
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from parallel_backend.diffusion import ModelSpec
from parallel_backend.errors import Refused
from parallel_backend.host import Backend, Deadlines
from parallel_backend.plan import ParallelPlan
from tests.support.comfy_oracle import comfy_on_path
from tests.support.nodes_module import nodes_module
from tests.vae.comfy_vaes import save_comfy_vae, save_image_vae


class Watched(Backend):
    """A backend that notes the models that it is asked to release."""

    released: list[ModelSpec]

    def release(self, model: ModelSpec, *given: Any) -> None:
        self.released.append(model)
        super().release(model, *given)


@pytest.fixture
def backend() -> Iterator[Watched]:
    made = Watched(Deadlines(), lambda *_: None)
    made.released = []
    yield made
    made.close()


@pytest.fixture
def load(backend: Watched, monkeypatch: pytest.MonkeyPatch) -> Any:
    comfy_on_path()
    server: Any = ModuleType("server")  # ComfyUI's server, which nothing here uses
    server.PromptServer = object
    monkeypatch.setitem(sys.modules, "server", server)
    module = nodes_module("vae.vae", monkeypatch)
    return lambda path: module.load_vae(backend, str(path), ParallelPlan(devices="cpu:2"), "comfyui")


@pytest.fixture(scope="module")
def picture_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_vae(tmp_path_factory.mktemp("vae") / "flux.safetensors", torch.float16)


def stock(path: Path) -> Any:
    tensors, metadata = import_module("comfy.utils").load_torch_file(str(path), return_metadata=True)
    return import_module("comfy.sd").VAE(sd=tensors, metadata=metadata)


def test_nodes_see_the_modules_names_and_shapes_of_comfyuis_own(load: Any, picture_file: Path) -> None:
    ours, theirs = load(picture_file).first_stage_model, stock(picture_file).first_stage_model
    assert isinstance(ours, type(theirs))
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]
    shapes = {name: (weight.shape, weight.dtype) for name, weight in theirs.state_dict().items()}
    assert {name: (weight.shape, weight.dtype) for name, weight in ours.state_dict().items()} == shapes
    assert len(shapes) > 100
    assert ours.decoder.ch == theirs.decoder.ch
    assert ours.to("cpu").half() is ours


def test_a_videos_statistics_are_comfyuis_and_changes_in_place_are_refused(load: Any, tmp_path: Path) -> None:
    """ComfyUI's latent upsampler reads them."""
    path = tmp_path / "ltx.safetensors"
    save_comfy_vae(path, "ltx")
    latent = torch.randn(1, 128, 2, 3, 2, generator=torch.Generator().manual_seed(3))
    proxy = load(path).first_stage_model
    ours, theirs = (model.per_channel_statistics for model in (proxy, stock(path).first_stage_model))
    for name in ("normalize", "un_normalize"):
        assert torch.equal(getattr(ours, name)(latent), getattr(theirs, name)(latent))
    assert not torch.equal(ours.normalize(latent), latent)
    proxy.refuse_changes()
    next(ours.buffers()).mul_(2.0)
    with pytest.raises(Refused, match=r"^Changing first_stage_model\.per_channel_statistics\..* with a parallel VAE"):
        proxy.refuse_changes()


def test_weights_that_only_workers_have_are_not_read_changed_or_copied(load: Any, picture_file: Path) -> None:
    vae = load(picture_file)
    model = vae.first_stage_model
    for read in (lambda: model.decoder.conv_in.weight + 1, lambda: model.decoder(torch.zeros(1, 16, 2, 2))):
        with pytest.raises(Refused, match=r"^Reading or changing the weights cannot be done with a parallel VAE"):
            read()
    model.decoder.conv_in.padding_mode = "circular"
    with pytest.raises(Refused, match=r"^Changing first_stage_model\.decoder\.conv_in\.padding_mode "):
        copy.deepcopy(vae)
    vae.first_stage_model = nn.Identity()
    for work in (lambda: vae.decode(torch.zeros(1, 16, 2, 2)), lambda: vae.encode(torch.zeros(1, 16, 16, 3))):
        with pytest.raises(Refused, match=r"^Replacing first_stage_model cannot be done with a parallel VAE"):
            work()


def abandoned(backend: Watched) -> bool:
    """Return True if a model is released, after waiting for the thread that releases it."""
    gc.collect()
    end = time.monotonic() + 1.0
    while not backend.released and time.monotonic() < end:
        time.sleep(0.02)
    return bool(backend.released)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_weights_are_held_until_the_last_copy_is_gone(
    load: Any, backend: Watched, picture_file: Path, copied: Any
) -> None:
    vae = load(picture_file)
    other = vae.first_stage_model if copied is copy.copy else vae
    other = copied(other)
    del vae
    assert not abandoned(backend)
    del other
    assert abandoned(backend)

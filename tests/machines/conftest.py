"""Two machines with workers that torchrun started, reached from here as ComfyUI reaches them."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from parallel_backend.host.workers.remote import ask
from parallel_backend.wire.handshake import VARIABLE
from tests.machines.network import Machines, obstacle
from tests.support.tiny.flux import save_flux

START_SECONDS = 480
"""Seconds for two torchruns with two ranks each on two busy cores."""


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Provide the two machines without workers; on machine b the model `tiny-dev.safetensors` has another name."""
    if (reason := obstacle()) is not None:
        warnings.warn(f"both machines are this one, on its loopback interface: {reason}", stacklevel=1)
    folder = tmp_path_factory.mktemp("machines")
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    model = save_flux(folder / "tiny-dev.safetensors", heads=2, double_blocks=1, single_blocks=3, guidance=True)
    machines = Machines(folder, secret, apart=reason is None)
    for models, name in zip(machines.models, (model.name, "inner/renamed.safetensors"), strict=True):
        copy = models / name
        copy.parent.mkdir(parents=True)
        copy.write_bytes(model.read_bytes())
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(secret))
        yield stack.enter_context(machines)


def wait_for(machines: Machines) -> None:
    """Wait until all ranks have connected."""
    try:
        ask(machines.address, START_SECONDS)
    except ValueError as error:
        pytest.fail(f"{error}\n{machines.logs()}")

"""Checks that weights leave the devices and come back."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import torch

from scripts.comfyui import ComfyUI
from tests.support.faulty import wait_until
from tests.support.graphs.flux import Graph, queue_logged
from tests.support.latents import saved_latent

RESTORED = re.compile(r"Parallel: (\S+): (\S+) MiB restored from host memory")


def free_until(server: ComfyUI, condition: Callable[[], object], **flags: bool) -> None:
    """Ask ComfyUI to free memory until `condition` holds. Raise AssertionError after 6 attempts of 5 seconds.

    Repeated because ComfyUI ignores a request while it collects garbage after a prompt.
    """
    for _ in range(6):
        server.free(**flags)
        with contextlib.suppress(AssertionError):
            return wait_until(condition, 5)
    raise AssertionError("not within 30 s")


def check_that_one_copy_waits_and_comes_back(server: ComfyUI, graph: Graph) -> None:
    """Check a graph on two workers that hold equal weights: one copy waits on the host and returns to the devices.

    The latent is bitwise equal before and after.
    """
    first = saved_latent(server, server.queue(graph, timeout=300).check())
    for _ in range(2):  # the first release also takes everything else off the workers' devices
        waiting = of_workers(server, lambda rank: rank["on_host"])
        size = on_devices(server) / 2
        free_until(server, lambda: on_devices(server) == 0)
        taken = of_workers(server, lambda rank: rank["on_host"]) - waiting
        run, log = queue_logged(server, graph)
        assert torch.equal(saved_latent(server, run.check()), first)
        assert RESTORED.search(log)
    assert size <= taken < 1.5 * size, "one copy, with what adapters may have put beside it"


def on_devices(server: ComfyUI) -> int:
    """Return the bytes of weights that the workers hold on their devices now."""
    return of_workers(server, lambda rank: sum(held["nbytes"] for held in rank["held"]))


def of_workers(server: ComfyUI, count: Callable[[Any], int]) -> int:
    """Return the sum of `count(rank)` over the ranks in the server's status report."""
    groups = server.get("/parallel/status")["workers"]["groups"]
    return sum(count(rank) for group in groups for rank in group["ranks"])

"""Soaks a real ComfyUI: runs many random prompts in a row and records the resources of its processes after each.

A seed decides models of three families, sizes, text lengths, batches, samplers, schedules, guidance and plans. From time to
time the prompt is a probe under a plan that keeps KSampler's picture. A probe's latent must equal the one that ComfyUI's own
KSampler made before. The resources after the first prompts bound those of later prompts. In the very first prompts, the same
workers load every model unsharded, the most that a worker keeps.

Run from the repository root: COMFYUI_PATH=... python -m benchmarks.soak [--prompts 300] [--seed 0]
It exits with 1 if a prompt failed or a resource grew beyond its bound.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file

from scripts.comfyui import ComfyUI, Graph
from tests.support.graphs.flux import ksampler_graph, node, parallel
from tests.support.latents import relative_error, saved_latent
from tests.support.sampler_names import LOCAL
from tests.support.server import TEXT_LENGTHS, fill
from tests.support.tiny import cogvideox as tiny_cogvideox
from tests.support.tiny import pixart as tiny_pixart
from tests.support.tiny.models import draw

MEBIBYTE = 1 << 20
SETTLE_SECONDS = 30.0
PROBE_EVERY = 25
TOLERANCE = 1e-5

FLUX = {"tiny-schnell": 4, "tiny-dev": 4, "tiny-3-heads": 3}
"""Models of FLUX and their attention heads."""
HEADS = FLUX | {"soak-pixart": 16, "soak-video": 3}
LOADERS = {"soak-pixart": "LoadParallelPixArt", "soak-video": "LoadParallelCogVideoX"}


@dataclass(frozen=True)
class Resources:
    """The resources of ComfyUI's process, the fork server and the workers after a prompt.

    For the workers, each value is the maximum over them. `processes` counts processes beyond ComfyUI, the fork server and the
    plan's workers. `shared` is the shared memory that any process has open or mapped, except weights that wait there for their
    device. Sizes are in MiB.
    """

    processes: int
    files_comfyui: int
    files_server: int
    files_worker: int
    shared: float
    rss_comfyui: float
    rss_server: float
    rss_worker: float


BOUNDS = Resources(
    processes=0, files_comfyui=8, files_server=4, files_worker=8, shared=0, rss_comfyui=32, rss_server=8, rss_worker=64
)
"""Largest allowed growth of each resource over its maximum in the first prompts."""


@dataclass
class Report:
    """The results of a soak."""

    held: list[Resources] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    plans: set[str] = field(default_factory=set)
    starts: int = 0
    seconds: float = 0.0

    def growth(self, first: int) -> Resources:
        """Return the growth of each maximum from the first `first` prompts to all later ones; negative for a decrease."""
        return Resources(
            **{
                name: max(getattr(held, name) for held in self.held[first:])
                - max(getattr(held, name) for held in self.held[:first])
                for name in NAMES
            }
        )

    def broken(self, first: int) -> list[str]:
        """Return the failures as text."""
        growth = self.growth(first)
        grown = [
            f"{name} grew by {getattr(growth, name):g}, more than {getattr(BOUNDS, name):g}"
            for name in NAMES
            if getattr(growth, name) > getattr(BOUNDS, name)
        ]
        wrong = [f"a probe has an error of {error:.1e}" for error in self.probes if not error <= TOLERANCE]
        return self.failures + grown + wrong


NAMES = tuple(entry.name for entry in fields(Resources))


def fill_families(server: ComfyUI) -> None:
    """Put the models that are not FLUX, and their prompts, into a server's folders."""
    models = server.base_dir / "models" / "diffusion_models"
    tiny_cogvideox.save_cogvideox(models / "soak-video.safetensors", "1.5")
    tiny_pixart.save_pixart(models / "soak-pixart.safetensors")
    for tokens in TEXT_LENGTHS:
        width = tiny_pixart.TEXT_WIDTH
        save_file({"cond": draw(1, tokens, width, seed=tokens)}, server.input_dir / f"soak-{tokens}.safetensors")


def draw_graph(chance: random.Random, devices: int, whole: str | None = None) -> Graph:
    """Return a random prompt on `devices` workers.

    Args:
        whole: a model that every worker holds unsharded; None for a random model and plan.
    """
    model = whole or chance.choice(list(HEADS))
    has_uncond = chance.random() < 0.5
    batch = chance.choice((1, 1, 2))
    width, height = (8 * chance.randint(8, 24) for _ in "wh")
    graph = ksampler_graph(
        model,
        positive=f"cond-{chance.choice(TEXT_LENGTHS)}",
        negative=f"cond-{chance.choice(TEXT_LENGTHS)}",
        width=width,
        height=height,
        batch=batch,
        seed=chance.getrandbits(32),
        steps=chance.randint(1, 4),
        cfg=2.0 if has_uncond else 1.0,
        sampler=chance.choice(LOCAL),
        scheduler=chance.choice(("simple", "normal", "beta", "sgm_uniform")),
    )
    if model not in FLUX:
        for side in ("positive", "negative"):
            graph[side]["inputs"]["conditioning"] = f"soak-{chance.choice(TEXT_LENGTHS[:4])}.safetensors"
    if model == "soak-video":
        size = {"width": 16 * chance.randint(3, 6), "height": 16 * chance.randint(3, 6), "batch_size": batch}
        graph["latent"] = node(
            "EmptyHunyuanLatentVideo", length=chance.choice((5, 13)), **size
        )  # latent frames come in twos
        graph["sampler"]["inputs"]["sampler_name"] = chance.choice(("cogvideox_ddim", "cogvideox_dpm", "euler"))
    plan = (
        {"ulysses": 1, "ring": devices}
        if whole
        else chance.choice(list(plans(devices, HEADS[model], has_uncond, batch)))
    )
    graph = parallel(graph, f"cpu:{devices}", sampler=False, **plan)
    graph["model"]["class_type"] = LOADERS.get(model, "LoadParallelFlux")
    return graph


def plans(devices: int, heads: int, has_uncond: bool, batch: int) -> Iterator[Mapping[str, int | str]]:
    """Yield all plans for a job on so many workers: an automatic one, and every product of degrees, replicated and sharded."""
    yield dict.fromkeys(("cfg", "pipefusion", "ulysses", "ring", "data"), 0)
    limits = {"cfg": 1 + has_uncond, "pipefusion": 3, "ulysses": heads, "ring": devices, "data": batch}
    for degrees in itertools.product(*(range(1, min(limit, devices) + 1) for limit in limits.values())):
        if math.prod(degrees) == devices:
            plan = dict(zip(limits, degrees, strict=True))
            yield plan
            yield (
                {**plan, "patches": 2, "warmup_steps": 1} if plan["pipefusion"] > 1 else {**plan, "weights": "sharded"}
            )


def probe_graph() -> Graph:
    """Return the prompt whose result is known."""
    return ksampler_graph("tiny-schnell", width=72, height=104, steps=3, cfg=2.0, seed=5)


def soak(server: ComfyUI, prompts: int, seed: int, most_workers: int = 4) -> Report:
    """Queue random prompts, one after the other, on a server that has the models."""
    chance = random.Random(seed)
    report = Report()
    expected = saved_latent(server, server.queue(probe_graph(), timeout=300).check())
    started, log = time.monotonic(), len(server.log)
    devices = 2
    models = iter(HEADS)
    for number in range(prompts):
        whole = next(models, None)
        if not whole and chance.random() < 0.2:
            devices = chance.randint(1, most_workers)
        graph = draw_graph(chance, devices, whole)
        probe = number % PROBE_EVERY == PROBE_EVERY - 1 or number == prompts - 1
        if probe:
            graph = parallel(probe_graph(), f"cpu:{devices}", ulysses=1, ring=devices)
        run = server.queue(graph, timeout=600)
        report.plans.add(described(graph))
        if run.status != "success":
            reason = run.error.exception_message if run.error else run.node_errors
            report.failures.append(f"prompt {number + 1} ({described(graph)}): {run.status}: {reason}")
        elif probe:
            report.probes.append(relative_error(saved_latent(server, run), expected))
        else:
            check_numbers(report, number, load_file(server.files(run, "save")[0])["latent_tensor"])
        report.held.append(held_by(server, devices))
        if (number + 1) % 50 == 0:
            seconds = time.monotonic() - started
            print(f"{number + 1} prompts, {seconds:.0f} s, {len(report.failures)} failed", flush=True)
    report.seconds = time.monotonic() - started
    report.starts = len(re.findall(r"Parallel: starting \d+ worker", server.log[log:]))
    return report


def check_numbers(report: Report, number: int, latent: torch.Tensor) -> None:
    """Note a failure if a latent is not finite or is all zeros."""
    if not latent.isfinite().all() or not latent.any():
        report.failures.append(f"prompt {number + 1}: no picture")


def described(graph: Graph) -> str:
    """Return a prompt's plan, model and sampler in one line."""
    plan = " ".join(f"{name} {value}" for name, value in graph["plan"]["inputs"].items())
    sampler = graph["sampler"]["inputs"]
    return f"{graph['model']['inputs']['unet_name']}, {plan}, {sampler['sampler_name']}, cfg {sampler['cfg']}"


def held_by(server: ComfyUI, workers: int) -> Resources:
    """Return the resources once the workers that had to end have ended."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while len(server.children()) > 1 + workers and time.monotonic() < deadline:
        time.sleep(0.02)
    comfyui = psutil.Process(server.process.pid)
    children = server.children()
    ours = [child for child in children if child.ppid() != comfyui.pid]
    servers = [child for child in children if child.ppid() == comfyui.pid]
    return Resources(
        processes=len(children) - 1 - workers,
        files_comfyui=comfyui.num_fds(),
        files_server=sum(process.num_fds() for process in servers),
        files_worker=max((process.num_fds() for process in ours), default=0),
        shared=sum(map(shared_memory, [comfyui, *children])),
        rss_comfyui=resident([comfyui]),
        rss_server=resident(servers),
        rss_worker=resident(ours),
    )


def resident(processes: Sequence[psutil.Process]) -> float:
    """Return the resident MiB of the largest of some processes."""
    return max((process.memory_info().rss for process in processes), default=0) / MEBIBYTE


def shared_memory(process: psutil.Process, waiting: bool = False) -> float:
    """Return the MiB of files in /dev/shm and of memfds that a process has open or mapped.

    A library's semaphores, such as tqdm's, do not count.

    Args:
        waiting: True to count weights that left their device and wait in host memory; they go with the workers at the latest.
    """
    found: dict[str, int] = {}
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            target = os.readlink(link)
            if _shared(target, waiting):
                found[target] = link.stat().st_size
        except OSError:
            continue  # closed meanwhile
    for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
        span, _, rest = line.partition(" ")
        name = rest.split(maxsplit=4)[-1]
        if _shared(name, waiting):
            start, end = (int(address, 16) for address in span.split("-"))
            found.setdefault(name, end - start)
    return sum(found.values()) / MEBIBYTE


def _shared(file: str, waiting: bool) -> bool:
    if file.startswith("/memfd:parallel weights"):
        return waiting
    return file.startswith(("/dev/shm/", "/memfd:")) and not file.startswith("/dev/shm/sem.")


def table(report: Report, first: int) -> str:
    """Return a Markdown table: the maxima of each group of `first` prompts, the growth after group 1, and the bounds."""
    rows = [["prompts", *(name.replace("_", " ") for name in NAMES)], ["---:"] * (len(NAMES) + 1)]
    for start in range(0, len(report.held), first):
        part = report.held[start : start + first]
        most = (max(getattr(held, name) for held in part) for name in NAMES)
        rows.append([f"{start + 1} to {start + len(part)}", *(f"{value:.0f}" for value in most)])
    growth = report.growth(first)
    rows.append(["growth", *(f"{getattr(growth, name):+.0f}" for name in NAMES)])
    rows.append(["bound", *(f"{getattr(BOUNDS, name):.0f}" for name in NAMES)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Run the soak and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument(
        "--first", type=int, default=50, help="number of first prompts, whose maxima set the bounds (default: 50)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = ComfyUI(os.environ["COMFYUI_PATH"], folder, env={"XDG_CACHE_HOME": f"{folder}/cache"})
        fill(server)
        fill_families(server)
        with server:
            report = soak(server, options.prompts, options.seed)
    print(table(report, options.first))
    print(
        f"{options.prompts} prompts, {len(report.plans)} different combinations of model, plan, sampler and cfg, in "
        f"{report.seconds:.0f} s; workers started {report.starts} times; {len(report.failures)} failed; "
        f"{len(report.probes)} probes, largest error {max(report.probes, default=0):.1e}"
    )
    broken = report.broken(options.first)
    print("\n".join(broken) or "nothing failed, and nothing grew beyond its bound")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

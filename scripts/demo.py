"""Draws one picture three ways in a real ComfyUI: with its own KSampler, with one parallel worker, and with several.

Prints the picture's path, the time of a step, and the error of the parallel latents against KSampler's. Exits with 1 if an
error is too large or anything fails.
"""

import argparse
import copy
import json
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from parallel_backend.bench.measure import follow, step_times
from parallel_backend.clock import seconds_per_step
from parallel_backend.distance import error_of
from parallel_backend.sprites import sprites
from scripts.comfyui import REPO, ComfyUI, ComfyUIError, Graph

TOLERANCE = 1e-5
SAMPLER = "sampler"
GRAPH = REPO / "scripts" / "sprites_api.json"


@dataclass(frozen=True)
class Drawing:
    """The result of one way of drawing: the picture, its latent, and the median seconds of a step."""

    picture: Path
    latent: torch.Tensor
    step: float


def parallel(graph: Graph, devices: str) -> Graph:
    """Return the graph with the parallel loader and the parallel sampler."""
    graph = copy.deepcopy(graph)
    graph["plan"] = {
        "class_type": "ParallelPlan",
        "inputs": {"devices": devices, "ulysses": 0, "ring": 0, "attention": "auto"},
    }
    graph["model"]["class_type"] = "LoadParallelFlux"
    graph["model"]["inputs"]["plan"] = ["plan", 0]
    graph[SAMPLER]["class_type"] = "ParallelSampler"
    return graph


def draw(comfyui: ComfyUI, title: str, graph: Graph) -> Drawing:
    """Run a graph twice and return the second run: the first run, with another seed, loads the model and warms up."""
    warm_up = copy.deepcopy(graph)
    warm_up[SAMPLER]["inputs"]["seed"] += 1
    del warm_up["save_latent"], warm_up["save_image"]
    warm_up["preview"] = {"class_type": "PreviewImage", "inputs": {"images": ["image", 0]}}
    follow(comfyui, f"{title}, loading", warm_up, [SAMPLER])
    run = follow(comfyui, title, graph, [SAMPLER])

    (latent_file,), (picture,) = comfyui.files(run, "save_latent"), comfyui.files(run, "save_image")
    times, steps = step_times(run, [SAMPLER]), graph[SAMPLER]["inputs"]["steps"]
    if len(times[0]) < steps:
        raise ComfyUIError(f"{title}: only {len(times[0])} of {steps} steps were reported")
    return Drawing(picture, load_file(latent_file)["latent_tensor"].double(), seconds_per_step(times))


def compare(drawing: Drawing, reference: Drawing) -> tuple[float, float]:
    """Return the relative L2 error and the largest absolute error of a latent."""
    return error_of(drawing.latent, reference.latent), (drawing.latent - reference.latent).abs().max().item()


def plans(devices: str | None) -> tuple[str, str]:
    """Return the devices of the two parallel drawings: of one worker, and of several."""
    if devices is None:
        devices = "auto" if torch.cuda.device_count() >= 2 else "cpu:2"
    if devices.startswith("cpu"):
        return "cpu:1", devices
    return "0" if devices == "auto" else devices.split(",")[0], devices


def report(reference: Drawing, single: Drawing, several: Drawing, *, on_cpu: bool) -> bool:
    """Print the summary. Return True if both parallel latents equal KSampler's."""
    print(f"\n{'':<26}{'seconds a step':>16}{'relative L2 error':>20}{'largest error':>16}")
    same = True
    for title, drawing in (
        ("ComfyUI's KSampler", reference),
        ("one worker", single),
        ("several workers", several),
    ):
        relative, largest = compare(drawing, reference)
        same &= relative <= TOLERANCE
        print(f"{title:<26}{drawing.step:>16.4f}{relative:>20.1e}{largest:>16.1e}")
    print(f"\nPicture: {several.picture}")
    print(f"The {'same' if same else 'WRONG'} picture: a relative error of at most {TOLERANCE:.0e} is allowed.")
    if on_cpu:
        print("The workers share this machine's CPU: the times say nothing about several GPUs.")
    else:
        print(f"Several workers make a step {single.step / several.step:.2f} times as fast as one.")
    return same


def main() -> int:
    """Run the demo and return the exit status."""
    parser = argparse.ArgumentParser(prog="demo.sh", description=__doc__)
    parser.add_argument("--comfyui", type=Path, required=True, help="ComfyUI's folder (demo.sh sets it)")
    parser.add_argument(
        "--base-dir", type=Path, required=True, help="the folder for models, log and pictures (demo.sh sets it)"
    )
    parser.add_argument(
        "--devices",
        help='devices of the plan with several workers, such as "0,1" or "cpu:4" (default: all GPUs if there '
        "are two or more, else two CPU workers)",
    )
    arguments = parser.parse_args()
    one, several = plans(arguments.devices)
    graph = json.loads(GRAPH.read_text())

    on_cpu = several.startswith("cpu")
    comfyui = ComfyUI(arguments.comfyui, arguments.base_dir, args=("--cpu",) if on_cpu else ())
    for folder, file in sprites():
        shutil.copy(file, comfyui.base_dir / folder)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # ComfyUI then stops as on Ctrl-C
    print(f"Starting ComfyUI; its log is {comfyui.log_path}", flush=True)
    try:
        with comfyui:
            drawings = (
                draw(comfyui, "ComfyUI's KSampler", graph),
                draw(comfyui, f"one worker ({one})", parallel(graph, one)),
                draw(comfyui, f"several workers ({several})", parallel(graph, several)),
            )
    except (ComfyUIError, TimeoutError) as error:
        print(f"demo.sh: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if report(*drawings, on_cpu=on_cpu) else 1


if __name__ == "__main__":
    sys.exit(main())

"""What the way into the workers costs, in a real ComfyUI on the CPU.

1. From the sampler node being called to the start of the first step, with workers that are up and hold the model.
2. What a step costs more when the loop runs in ComfyUI, one forward of the model at a time.

Run from the repository root: COMFYUI_PATH=... python -m benchmarks.overhead
"""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise
from statistics import median

from scripts.comfyui import ComfyUI, Graph, StepProgress
from tests.support.graphs.flux import insert_after_model, ksampler_graph, parallel
from tests.support.server import fill

STEPS = 20
ROUNDS = 5


def time_graph(server: ComfyUI, graph: Graph) -> tuple[float, float]:
    """Seconds from the sampler node's start to its first step's, and the median seconds of a step."""
    times: list[float] = []

    def on_progress(progress: StepProgress) -> None:
        if progress.node == "sampler":
            times.append(progress.time)

    run = server.queue(graph, on_progress=on_progress, timeout=300).check()
    steps = [later - earlier for earlier, later in pairwise(times)]
    called = run.started["sampler"]
    return times[0] - called - median(steps), median(steps)


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        server = ComfyUI(os.environ["COMFYUI_PATH"], folder)
        fill(server)
        base = ksampler_graph("tiny-schnell", steps=STEPS)
        kinds = {
            "ComfyUI's KSampler": base,
            "loop in the workers": parallel(base, "cpu:2"),
            "one forward per call": insert_after_model(
                parallel(base, "cpu:2"),
                "EasyCache",
                reuse_threshold=0.0,
                start_percent=0.0,
                end_percent=1.0,
                verbose=False,
            ),
        }
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        with server:
            for seed in range(ROUNDS + 1):
                for name, graph in kinds.items():
                    graph["sampler"]["inputs"]["seed"] = seed
                    figure = time_graph(server, graph)
                    if seed:  # the first round loads and warms up
                        figures[name].append(figure)
    print("| | called to first step, ms | a step, ms |\n|---|---:|---:|")
    for name, values in figures.items():
        starts, steps = zip(*values, strict=True)
        print(f"| {name} | {1e3 * median(starts):.0f} | {1e3 * median(steps):.1f} |")


if __name__ == "__main__":
    main()

"""What telling of a run's progress costs, in a real ComfyUI on the CPU.

1. From the prompt to the first text on the sampler node: when workers have to be started, and when they run.
2. What a step costs more because it is told: the time in the thread that samples, with ComfyUI's server and its loop.

Run from the repository root: COMFYUI_PATH=... python -m benchmarks.progress
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from statistics import median

from scripts.comfyui import REPO, ComfyUI
from tests.support.graphs.flux import ksampler_graph, parallel
from tests.support.server import fill

ROUNDS = 3

A_STEP = """
import asyncio, importlib.util, sys, threading, time
import comfy.cli_args
comfy.cli_args.args.cpu, comfy.cli_args.args.base_directory = True, "."
import server
from comfy_execution.utils import CurrentNodeContext
root = sys.argv[1]
spec = importlib.util.spec_from_file_location("pack", root + "/__init__.py", submodule_search_locations=[root])
sys.modules["pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["pack"])
from pack.nodes.progress import Progress
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)
prompt_server = server.PromptServer(loop)
prompt_server.client_id = "page"
threading.Thread(target=lambda: loop.run_until_complete(prompt_server.publish_loop()), daemon=True).start()
steps = 5000
with CurrentNodeContext("prompt", "sampler"), Progress().run("Step", steps) as run:
    began = time.perf_counter()
    for step in range(steps):
        run.step(step + 1)
    print(1e6 * (time.perf_counter() - began) / steps)
"""


def first_text(server: ComfyUI, seed: int, devices: str) -> tuple[float, float]:
    """Seconds to the first text on the sampler node: from the prompt, and from when ComfyUI began with that node."""
    graph = parallel(ksampler_graph("tiny-schnell", seed=seed), devices)
    run = server.queue(graph, timeout=300).check()
    at = next(each.time for each in run.texts if each.node == "sampler")
    return at - run.submitted, at - run.started["sampler"]


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        server = ComfyUI(os.environ["COMFYUI_PATH"], folder)
        fill(server)
        with server:
            starting = [first_text(server, seed, f"cpu:{1 + seed % 2}") for seed in range(ROUNDS)]
            running = [first_text(server, 100 + seed, f"cpu:{1 + (ROUNDS - 1) % 2}") for seed in range(ROUNDS)]
    environment = {**os.environ, "PYTHONPATH": os.environ["COMFYUI_PATH"]}
    command = [sys.executable, "-c", A_STEP, str(REPO)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    print("| first text | from the prompt, ms | from the sampler node's turn, ms |\n|---|---:|---:|")
    cases = {"the very first prompt": starting[:1], "workers to be started": starting, "workers running": running}
    for name, figures in cases.items():
        prompt, node = (median(column) for column in zip(*figures, strict=True))
        print(f"| {name} | {1e3 * prompt:.0f} | {1e3 * node:.0f} |")
    print(f"\nTelling of a step: {float(done.stdout.splitlines()[-1]):.0f} µs")


if __name__ == "__main__":
    main()

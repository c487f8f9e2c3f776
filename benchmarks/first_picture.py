"""Where the time goes from Run to the first picture of "Sprites without a GPU", in a ComfyUI that has just started.

Once with what workers are forked from prepared, as it is when a page has had the workflow open for some seconds, and once
without. Processor seconds do not depend on what else the machine does; on two idle cores the picture is there sooner than that.

Run from the repository root: COMFYUI_PATH=... python -m benchmarks.first_picture
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from scripts.comfyui import REPO, ComfyUI, Graph, NodeText, QueuedRun
from tests.support.server import fill

EXPECTED: Any = {
    "kind": "LoadParallelFlux",
    "file": "sprites-flux-schnell.safetensors",
    "plan": {"devices": "cpu:2"},
    "width": 128,
    "height": 128,
    "two_sided": True,
    "steps": 20,
}
QUIET = 0.05
"""Processor seconds in one second, below which a process waits."""


def graph() -> Graph:
    """The template's, as it is queued."""
    made: Graph = json.loads((REPO / "scripts" / "sprites_parallel_api.json").read_text(encoding="utf-8"))
    made["plan"]["inputs"]["devices"] = "cpu:2"
    return made


def used(server: ComfyUI) -> dict[str, float]:
    """Processor seconds of ComfyUI, of the fork server and of the workers, so far."""
    seconds = dict.fromkeys(("ComfyUI", "fork server", "workers"), 0.0)
    for process in (psutil.Process(server.process.pid), *server.children()):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            forks = "parallel_backend.worker.forkserver" in process.cmdline()
            kind = "workers" if process.name().startswith("parallel-rank") else "fork server" if forks else "ComfyUI"
            seconds[kind] += times.user + times.system
    return seconds


def wait_until_quiet(server: ComfyUI) -> None:
    """Until nothing is computed any more."""
    before = sum(used(server).values())
    while True:
        time.sleep(1)
        now = sum(used(server).values())
        if now - before < QUIET:
            return
        before = now


def first_picture(prepared: bool) -> list[tuple[str, float, dict[str, float]]]:
    """What was told, when it was, in seconds since Run, and the processor seconds until then."""
    with tempfile.TemporaryDirectory() as folder:
        server = ComfyUI(os.environ["COMFYUI_PATH"], Path(folder))
        fill(server)
        with server:
            if prepared:
                server.ask("/parallel/expectation", EXPECTED)
            wait_until_quiet(server)
            began, before = time.perf_counter(), used(server)
            rows: list[tuple[str, float, dict[str, float]]] = []

            def note(what: str) -> None:
                spent = {kind: seconds - before[kind] for kind, seconds in used(server).items()}
                rows.append((what, time.perf_counter() - began, spent))

            def hear(text: NodeText) -> None:
                what = text.text.partition(" ")[0]
                what = "what it came to" if what[:1].isdigit() else what
                if what not in [told for told, _, _ in rows]:
                    note(what)

            run: QueuedRun = server.queue(graph(), on_text=hear, timeout=1200)
            run.check()
            note("the picture")
            return rows


def main() -> None:
    """Print the figures."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.parse_args()
    for prepared in (True, False):
        print(f"\n{'Prepared' if prepared else 'Not prepared'}\n")
        print("| until | s | ComfyUI | fork server | workers | processor seconds |\n|---|---:|---:|---:|---:|---:|")
        for what, seconds, spent in first_picture(prepared):
            columns = " | ".join(f"{value:.1f}" for value in (*spent.values(), sum(spent.values())))
            print(f"| {what} | {seconds:.1f} | {columns} |", flush=True)


if __name__ == "__main__":
    main()

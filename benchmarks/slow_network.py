"""PipeFusion, and Ulysses in chunks of heads, against Ulysses and Ring where the network is slow.

Two ranks, each in a network namespace of its own.
From the repository's root, as root: OMP_NUM_THREADS=1 COMFYUI_PATH=… python -m benchmarks.slow_network
The namespaces are joined by a veth pair that `tc` (tbf) holds to a rate in both directions. Each has one worker, started
as on several machines, and the first has the host too. Prints a Markdown table and writes docs/measured/slow-network.md.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

import msgspec
import torch
from torch import Tensor

from parallel_backend.diffusion import FlowSettings, ModelSpec, PromptSpec
from parallel_backend.host import Backend
from parallel_backend.host.workers.pending_request import RequestContext
from parallel_backend.host.workers.remote import ask
from parallel_backend.plan import ParallelPlan, ResolvedPlan
from parallel_backend.wire.address import Address
from parallel_backend.wire.secret import VARIABLE
from tests.support.plans import cpu_plan
from tests.support.programs import encoded_program
from tests.support.tiny.flux import CHANNELS, POOLED_WIDTH, TEXT_WIDTH, save_flux

PAGE = Path(__file__).parents[1] / "docs" / "measured" / "slow-network.md"
COMMAND = "OMP_NUM_THREADS=1 COMFYUI_PATH=… python -m benchmarks.slow_network"
INTERFACE = "shaped0"
ADDRESS = Address("10.77.0.1", 29600)
START_SECONDS = 120
PROBE_PORT = 29400
PROBE_BYTES = 20_000_000
HEADS, DOUBLE_BLOCKS, SINGLE_BLOCKS = 4, 2, 4
BLOCKS = DOUBLE_BLOCKS + SINGLE_BLOCKS
TEXT = 128
NOTE = (
    "gloo is slow when it sends both ways at once, as Ulysses and Ring do: in a separate measurement on the same link, "
    "all_to_all_single and isend with irecv of 1.75 to 14 MB moved about 50 Mbit/s each way, a plain TCP connection 83 to "
    "92. A transport that filled both ways would take about half the time for Ulysses and Ring; PipeFusion's bytes go one way."
)

PROBE = """
import socket, sys, time
role, address, port, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if role == "receive":
    with socket.create_server((address, port)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            got = len(connection.recv(1 << 20))
            start, first = time.perf_counter(), got
            while got < size:
                got += len(connection.recv(1 << 20))
            print((got - first) * 8 / 1e6 / (time.perf_counter() - start))
else:
    with socket.create_connection((address, port)) as connection:
        connection.sendall(bytes(size))
"""


def plans() -> dict[str, ResolvedPlan]:
    """What is compared."""
    return {
        "Ulysses 2": cpu_plan(ulysses=2, blocks=BLOCKS),
        "Ulysses 2, heads in 2 chunks": cpu_plan(ulysses=2, blocks=BLOCKS, head_chunks=2),
        "Ring 2": cpu_plan(ring=2, blocks=BLOCKS),
        "PipeFusion 2, 2 patches": cpu_plan(pipefusion=2, patches=2, blocks=BLOCKS),
        "PipeFusion 2, 4 patches": cpu_plan(pipefusion=2, patches=4, blocks=BLOCKS),
    }


def sh(*command: str) -> str:
    """Run a command; its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Network:
    """Two namespaces joined by a cable with the same interface name and the addresses 10.77.0.1 and .2 at its ends."""

    def __init__(self) -> None:
        self.spaces = [f"parallel-{os.getpid()}-{rank}" for rank in range(2)]

    def __enter__(self) -> Network:
        try:
            for space in self.spaces:
                sh("ip", "netns", "add", space)
            here, there = self.spaces
            ends = ("netns", here, "type", "veth", "peer", "name", INTERFACE, "netns", there)
            sh("ip", "link", "add", INTERFACE, *ends)
            for rank, space in enumerate(self.spaces):
                sh("ip", "-n", space, "link", "set", "lo", "up")
                sh("ip", "-n", space, "address", "add", f"10.77.0.{rank + 1}/24", "dev", INTERFACE)
                sh("ip", "-n", space, "link", "set", INTERFACE, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for space in self.spaces:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def shape(self, megabits: int) -> None:
        """Hold both directions to a rate; 0 lets them run free."""
        for space in self.spaces:
            device = ("dev", INTERFACE, "root")
            if megabits:
                limits = ("rate", f"{megabits}mbit", "burst", "64kb", "latency", "50ms")
                sh("tc", "-n", space, "qdisc", "replace", *device, "tbf", *limits)
            else:
                subprocess.run(["tc", "-n", space, "qdisc", "del", *device], capture_output=True, check=False)

    def measured(self) -> float:
        """Megabits a second that one TCP connection gets across."""
        ways = (("receive", self.spaces[0]), ("send", self.spaces[1]))
        commands = [
            [
                "ip",
                "netns",
                "exec",
                space,
                sys.executable,
                "-c",
                PROBE,
                way,
                "10.77.0.1",
                str(PROBE_PORT),
                str(PROBE_BYTES),
            ]
            for way, space in ways
        ]
        with subprocess.Popen(commands[0], stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            try:
                receiver.stdout.readline()
                sh(*commands[1])
                return float(receiver.stdout.readline())
            finally:
                receiver.kill()

    @contextmanager
    def workers(self, folder: Path) -> Iterator[Backend]:
        """A backend in namespace 0, which this thread does not leave again, and rank n in namespace n."""
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(token_hex(32))
        os.environ[VARIABLE] = str(secret)
        together = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": ADDRESS.host,
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        worker = [sys.executable, "-m", "parallel_backend.worker", "--listen", str(ADDRESS), "--device", "cpu"]
        worker += ["--comfyui", os.environ["COMFYUI_PATH"]]
        ranks = [
            subprocess.Popen(["ip", "netns", "exec", space, *worker], env={**os.environ, **together, "RANK": str(rank)})
            for rank, space in enumerate(self.spaces)
        ]
        try:
            enter_namespace(self.spaces[0])
            ask(ADDRESS, START_SECONDS)
            backend = Backend()
            yield backend
            backend.close()
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def enter_namespace(name: str) -> None:
    """Have this thread's new sockets be in a network namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as namespace:
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"namespace {name} cannot be entered")


@dataclass
class Job:
    """A denoise of a tiny FLUX from pure noise: `side` image tokens each way, euler without guidance."""

    path: Path
    side: int
    steps: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        shapes = {
            "x": (1, CHANNELS, 2 * self.side, 2 * self.side),
            "prompt.positive.context": (1, TEXT, TEXT_WIDTH),
            "prompt.positive.y": (1, POOLED_WIDTH),
        }
        sigmas = torch.linspace(1, 0, self.steps + 1)
        self._tensors: Mapping[str, Tensor] = {
            "sigmas": sigmas,
            "program": encoded_program("euler", sigmas, torch.empty(shapes["x"])),
            **{name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()},
        }

    def run(self, backend: Backend, plan: ResolvedPlan) -> Run:
        """One denoise."""
        status = self.path.stat()
        ends: list[float] = []
        answer = backend.sample(
            self._tensors,
            lambda *_: ends.append(time.perf_counter()),
            RequestContext(),
            model=ModelSpec("comfyui", str(self.path), status.st_mtime_ns, status.st_size, "float32"),
            plan=plan,
            compute_dtype="float32",
            sampling=FlowSettings(timestep_scale=1.0, noise_scale=1.0),
            cfg=1.0,
            positive=[PromptSpec({"context": "prompt.positive.context", "y": "prompt.positive.y"})],
            negative=None,
        )
        return Run(
            whole=max(report.seconds for report in answer.reports) / self.steps,
            steady=(ends[-1] - ends[0]) / (self.steps - 1),
            waiting=max(report.waiting for report in answer.reports) / self.steps,
            sent=[sum(report.sent.values()) // self.steps for report in sorted(answer.reports, key=lambda r: r.rank)],
        )


@dataclass(frozen=True)
class Run:
    """Seconds a step over the whole run, after the first step, and of waiting on the rank that waits longest; bytes that each
    rank sent a step."""

    whole: float
    steady: float
    waiting: float
    sent: list[int]


@dataclass
class Series:
    """The runs of one plan on the shaped link and on the free one."""

    shaped: list[Run] = field(default_factory=list)
    free: list[Run] = field(default_factory=list)


def measure(network: Network, job: Job, rounds: int, megabits: int, only: str) -> dict[str, Series]:
    """All plans whose name has `only` in it on the shaped link in turn, `rounds` times, and then as often on the free one."""
    asked = {name: plan for name, plan in plans().items() if only in name}
    series = {name: Series() for name in asked}
    with network.workers(job.path.parent) as backend:
        devices = tuple(backend.placed_on_devices(ParallelPlan(devices=str(ADDRESS))).devices.split(","))
        for rate in (megabits, 0):
            network.shape(rate)
            for _ in range(rounds):
                for name, plan in asked.items():
                    runs = series[name].shaped if rate else series[name].free
                    runs.append(job.run(backend, msgspec.structs.replace(plan, devices=devices)))
                    print(f"{rate or 'free'} {name}: {runs[-1]}", file=sys.stderr, flush=True)
    return series


def page(job: Job, rounds: int, megabits: int, rate: float, series: Mapping[str, Series]) -> str:
    """The document."""

    def median(runs: list[Run], what: str) -> float:
        return statistics.median(getattr(run, what) for run in runs)

    base = median(next(iter(series.values())).shaped, "whole")
    lines = [
        "# PipeFusion on a slow network",
        "",
        f"Written by `{COMMAND}` (as root): two ranks on CPUs (gloo, one thread each), each in a network namespace "
        f"of its own, joined by a link limited to {megabits} Mbit/s each way ({rate:.0f} Mbit/s measured over TCP). Random "
        f"FLUX in fp32, {HEADS} heads, {DOUBLE_BLOCKS} double and {SINGLE_BLOCKS} single blocks, {job.side**2} image and "
        f"{TEXT} text tokens, {job.steps} steps of euler, the first being PipeFusion's warm-up. Medians of {rounds} denoises, "
        "the plans taking turns. *Free link*: without the limit.",
        "",
        "| plan | s a step | of the first | after the first step | waiting, s | free link | bytes sent a step, ranks 0 and 1 |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, each in series.items():
        whole, steady = median(each.shaped, "whole"), median(each.shaped, "steady")
        sent = ", ".join(f"{count:,}" for count in each.shaped[0].sent)
        free, waiting = median(each.free, "whole"), median(each.shaped, "waiting")
        lines.append(
            f"| {name} | {whole:.2f} | {whole / base:.2f} | {steady:.2f} | {waiting:.2f} | {free:.2f} | {sent} |"
        )
    return "\n".join([*lines, "", NOTE, ""])


def main() -> int:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabits", type=int, default=100)
    parser.add_argument("--side", type=int, default=32, help="image tokens each way")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="", help="plans whose name has this in it, and no page")
    parser.add_argument("--no-page", action="store_true", help="print only")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        print("This benchmark makes network namespaces, which needs root: run it as root.", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go then too
    with tempfile.TemporaryDirectory() as folder, Network() as network:
        blocks = {"double_blocks": DOUBLE_BLOCKS, "single_blocks": SINGLE_BLOCKS}
        path = save_flux(Path(folder) / "flux.safetensors", heads=HEADS, **blocks)
        network.shape(arguments.megabits)
        rate = network.measured()
        print(f"the link passes {rate:.1f} Mbit/s", file=sys.stderr)
        job = Job(path, arguments.side, arguments.steps)
        series = measure(network, job, arguments.rounds, arguments.megabits, arguments.only)
    text = page(job, arguments.rounds, arguments.megabits, rate, series)
    print(text)
    if not arguments.no_page and not arguments.only:
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

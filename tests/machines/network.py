"""Two machines for tests: network namespaces with a cable between them, separate host names, and torchrun on each.

If namespaces are not permitted, both machines are this one, on the loopback interface.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from parallel_backend.wire.address import SCHEME, Address
from scripts.comfyui import REPO, free_port

HOST = "10.87.0.1"
"""Machine a's address on the cable between the machines. This machine reaches it over a separate cable to machine a."""

HERE = "10.87.1.254"
"""This machine's address on the separate cable."""


def sh(*command: str) -> str:
    """Run a command and return its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def obstacle() -> str | None:
    """Return the reason why network namespaces do not work here, or None if they work."""
    name = f"parallel-probe-{os.getpid()}"
    try:
        sh("ip", "netns", "add", name)
        sh("ip", "netns", "exec", name, "unshare", "--uts", "true")
        sh("ip", "link", "add", "probe", "netns", name, "type", "veth", "peer", "name", "other", "netns", name)
    except FileNotFoundError:
        return "iproute2 is not installed"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here ({error.stderr.strip()})"
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


@dataclass
class Machines:
    """Machines a and b, which exist inside `with`. Workers run from `start` to `stop`.

    `apart` is true if the machines are namespaces. `names` are their host names. `here` is this process's address for them.
    """

    folder: Path
    secret: Path
    apart: bool
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spaces = [f"parallel-{os.getpid()}-{name}" for name in "ab"]
        self.uplink = f"pu{os.getpid()}"
        if self.apart:
            self.names, self.here = ("machine-a", "machine-b"), HERE
            self.address, self.rendezvous = Address(HOST, 29600), 29500
        else:
            self.names, self.here = (socket.gethostname(),) * 2, "127.0.0.1"
            self.address, self.rendezvous = Address(self.here, free_port()), free_port()

    def __enter__(self) -> Machines:
        if not self.apart:
            return self
        try:
            for space in self.spaces:
                sh("ip", "netns", "add", space)
                sh("ip", "-n", space, "link", "set", "lo", "up")
            a, b = self.spaces
            sh("ip", "link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
            sh("ip", "link", "add", self.uplink, "type", "veth", "peer", "name", "uplink", "netns", a)
            addresses = (a, "cable", f"{HOST}/24"), (b, "cable", "10.87.0.2/24"), (a, "uplink", "10.87.1.1/24")
            for space, device, address in addresses:
                sh("ip", "-n", space, "address", "add", address, "dev", device)
                sh("ip", "-n", space, "link", "set", device, "up")
            sh("ip", "address", "add", f"{HERE}/24", "dev", self.uplink)
            sh("ip", "link", "set", self.uplink, "up")
            sh("ip", "route", "add", HOST, "via", "10.87.1.1")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for space in self.spaces if self.apart else ():  # the cables disappear with the namespaces
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    @property
    def models(self) -> tuple[Path, Path]:
        """Return each machine's folder of models."""
        return self.folder / "machine-a", self.folder / "machine-b"

    def cable(self, up: bool) -> None:
        """Pull the cable between the machines out at b, or plug it in again."""
        sh("ip", "-n", self.spaces[1], "link", "set", "cable", "up" if up else "down")

    def kill(self, rank: int) -> None:
        """Kill a worker as a system does that runs out of memory."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.secret) in process.cmdline() and process.environ().get("RANK") == str(rank):
                    process.kill()

    def start(self, packages: tuple[str, str] = ("", "")) -> None:
        """Start two workers on each machine by torchrun, each machine with a folder at the start of its PYTHONPATH."""
        for node, folder in enumerate(packages):
            self.start_machine(node, folder)

    def start_machine(self, node: int, packages: str) -> None:
        """Start two workers on one machine by torchrun."""
        models = self.models[node]
        models.mkdir(exist_ok=True)
        enter = ["ip", "netns", "exec", self.spaces[node], "unshare", "--uts", "sh", "-c"]
        command = [
            *([*enter, f'hostname {self.names[node]} && exec "$@"', "sh"] if self.apart else []),
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
            *("--node-rank", str(node), "--master-addr", self.address.host),
            *("--master-port", str(self.rendezvous), "--max-restarts", "10"),
            *("-m", "parallel_backend.worker", "--listen", str(self.address).removeprefix(SCHEME)),
            *("--device", "cpu", "--models", str(models), "--secret", str(self.secret)),
            *("--comfyui", os.environ["COMFYUI_PATH"]),
        ]
        paths = os.pathsep.join(filter(None, [packages, str(REPO)]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        with models.with_suffix(".log").open("ab") as log:
            self.agents[node] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=REPO
            )

    def lose_machine(self, node: int) -> None:
        """End torchrun and its workers on a machine, as a power cut does."""
        agent = self.agents.pop(node)
        process = psutil.Process(agent.pid)
        for each in (process, *process.children(recursive=True)):
            each.kill()
        agent.wait()

    def stop(self) -> None:
        """End both agents and their workers."""
        for agent in self.agents.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGTERM)
        for agent in self.agents.values():
            try:
                agent.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
        self.agents.clear()

    def logs(self) -> str:
        """Return the output of both agents and their workers."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')}" for path in sorted(self.folder.glob("*.log"))
        )

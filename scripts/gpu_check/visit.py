"""One visit to a machine with GPUs: runs lists of checks one after the other, each within its time, and writes one report.

    python -m scripts.gpu_check.visit --out FOLDER             # the lists in the order of their value (see gpu.sh)
    python -m scripts.gpu_check.visit --out FOLDER one races   # these lists, in this order
    python -m scripts.gpu_check.visit --out FOLDER check       # only checks that the lists would start

FOLDER then has summary.txt (a line per check), lines.jsonl (the same with figures), machine.txt and report.tar.gz (all of
these).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from parallel_backend.comfyui_folder import FOLDER

REPO = Path(__file__).parents[2]

LINES = "PARALLEL_GPU_LINES"
"""Environment variable with the name of the file to which each line is added, as JSON. Without it nothing is written."""

LIMIT = 540
"""Seconds of a whole visit."""

INSTALLATION = 40
"""Seconds that `gpu_on_card.sh` and the list `ready` take before the other lists begin."""

ENDING = 15
"""Seconds that are kept for ending a list that hangs and for the archive."""

PATIENCE = 10
"""Seconds in which a list that was told to end may end its own processes."""

MISSING = 3
"""Exit status when something is missing."""

VERDICT = re.compile(r"^(?:\[\d+\] )?(PASS|FAIL|INFO) .*", re.MULTILINE)


class Entry(NamedTuple):
    """The rules by which one list is run.

    Attributes:
        seconds: seconds that the list may always take.
        each_card: True if each card has a rank of the list; on one card, two ranks share the card.
        broken: the verdict when the list does not end by itself.
        loading: the value of CUDA_MODULE_LOADING, if the list depends on it.
    """

    seconds: int
    each_card: bool = False
    broken: str = "FAIL"
    loading: str = ""


ENTRIES: Mapping[str, Entry] = {
    "prompts": Entry(100),
    "one": Entry(110),
    "races": Entry(60),
    "formats": Entry(50),
    "shares": Entry(130),
    "doctor": Entry(20),
    "compiled": Entry(140, broken="INFO"),  # a compiler takes as long as it takes
    "whole": Entry(80),
    "connections": Entry(20, each_card=True),
    "many": Entry(65, each_card=True, loading="LAZY"),
    "pipeline": Entry(35, each_card=True, loading="EAGER"),  # the launcher loads kernels so for pipeline stages
    "pipeline-lazy": Entry(20, each_card=True, loading="LAZY", broken="INFO"),  # shows if eager loading is necessary
}
"""The lists of checks and their rules. The seconds have a margin above those that an H200 took."""

ONE_CARD = ("prompts", "one", "races", "formats", "shares", "doctor")
"""Order of the lists on one card, by value, because the visit may be cut off at any line."""

ONE_CARD_AGAIN = ("compiled", "whole", "many", "connections")
"""The lists that do not fit into the first visit to one card; the command of a second visit names them."""

SEVERAL_CARDS = ("connections", "many", "pipeline", "pipeline-lazy", "doctor", "prompts", "one", "races", "formats")
"""Order of the lists on several cards: first those that one card cannot run. Other lists run if they are named."""


def command_of(name: str, cards: int, device: str) -> list[str]:
    """Return the command line of a list on one device, or on all cards if the list is for several ranks."""
    if name == "doctor":
        return [sys.executable, "-m", "parallel_backend.doctor"]
    checks = ["-m", "scripts.gpu_check", name.partition("-")[0], "--device", device]
    if name in ENTRIES and ENTRIES[name].each_card:
        ranks = f"--nproc-per-node={max(2, cards)}"
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, *checks]
    return [sys.executable, *checks]


def seconds_for(name: str, later: Sequence[str], left: float) -> float:
    """Return the time limit of a list, in seconds.

    The limit is at least the list's own seconds. It grows to at most twice as many, as long as every later list keeps its own
    seconds. A list that hangs therefore takes no time from the later lists.

    Args:
        name: the list that is about to run.
        later: the lists that follow.
        left: seconds until the visit ends.
    """
    own = ENTRIES[name].seconds
    spare = left - sum(ENTRIES[each].seconds for each in later)
    return min(left, max(own, min(2 * own, spare)))


def run(command: Sequence[str], log: Path, seconds: float, environment: Mapping[str, str]) -> int | None:
    """Run a command, show and keep its output, and end it when its time is over.

    Args:
        command: the command line.
        log: the file that keeps the output.
        seconds: the command's time.
        environment: variables in addition to those of this process.

    Returns:
        The exit status, or None if the time was over.
    """
    deadline = time.monotonic() + seconds
    # Into a file, not a pipe: a process that outlives the command would hold the pipe open.
    with log.open("wb") as sink, log.open("rb") as source:
        process = subprocess.Popen(
            command, cwd=REPO, env={**os.environ, **environment}, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )  # fmt: skip
        try:
            while True:
                status = process.poll()
                sys.stdout.buffer.write(source.read())
                sys.stdout.buffer.flush()
                if status is not None or time.monotonic() > deadline:
                    return status
                time.sleep(0.1)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all processes that it started."""
    import psutil  # imported late, because this visit may have installed it

    if process.poll() is not None:
        return
    started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()  # torchrun ends its ranks, and `prompts` its ComfyUI
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.kill()
    process.wait()


class Visit:
    """The lists of one visit and its report.

    Attributes:
        out: the folder that receives the report.
        logs: the folder that keeps the output of each list until the report is packed.
    """

    def __init__(self, out: Path, logs: Path, device: str, cards: int, deadline: float) -> None:
        self.out, self.logs, self.device, self.cards = out, logs, device, cards
        self.failed: list[str] = []
        self.counted: list[str] = []
        self._deadline = deadline

    @property
    def left(self) -> float:
        """Return the seconds until the archive has to be written."""
        return self._deadline - time.monotonic()

    def ready(self) -> bool:
        """Run the list `ready`, whose output describes this machine."""
        machine = self.logs / "ready.txt"
        status = run(command_of("ready", self.cards, self.device), machine, self.left, {})
        return status == 0 and "FAIL" not in _verdicts(machine)

    def install(self) -> None:
        """Install missing packages with this machine's pip. The installation does not count as time of the visit."""
        begun = time.monotonic()
        needed = [REPO / "requirements.txt", Path(os.environ[FOLDER], "requirements.txt")]
        files = [argument for file in needed for argument in ("-r", str(file))]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *files])
        self._deadline += time.monotonic() - begun

    def describe(self) -> None:
        """Write the driver's description of this machine."""
        with (self.out / "machine.txt").open("wb") as file:
            file.write((self.logs / "ready.txt").read_bytes())
            file.flush()
            for command in (["nvidia-smi", "-q"], ["nvidia-smi", "topo", "-m"]):
                if shutil.which(command[0]):
                    subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=60)

    def run(self, names: Sequence[str]) -> None:
        """Run the lists one after the other. Their time limits are for a card; on the CPU only the visit's end counts."""
        for place, name in enumerate(names):
            if self.left > 0:
                seconds = seconds_for(name, names[place + 1 :], self.left) if self.device == "cuda" else self.left
                self.run_list(name, seconds)
            else:
                self.add(name, [f"{ENTRIES[name].broken} {name}: not run, because the time limit was reached"], 0)

    def run_list(self, name: str, seconds: float) -> None:
        """Run one list and add its lines to the summary."""
        entry, log, begun = ENTRIES[name], self.logs / f"{name}.txt", time.monotonic()
        environment = {"OUT": str(self.logs), LINES: str(self.out / "lines.jsonl")} | (
            {"CUDA_MODULE_LOADING": entry.loading} if entry.loading else {}
        )
        status = run(command_of(name, self.cards, self.device), log, seconds, environment)
        lines = [found[0] for found in VERDICT.finditer(log.read_text(errors="replace"))]
        if status is None:
            lines.append(f"{entry.broken} {name}: hangs, or takes longer than {seconds:.0f} s")
        elif status:
            lines.append(f"{entry.broken} {name}: ended with exit code {status}")
        self.add(name, lines, time.monotonic() - begun)

    def add(self, name: str, lines: Sequence[str], seconds: float) -> None:
        """Add a list's lines to the summary."""
        with (self.out / "summary.txt").open("a") as summary:
            summary.writelines(f"{name}: {line}\n" for line in lines)
        found = [match[1] for line in lines if (match := VERDICT.match(line))]
        self.failed += [f"{name}: {line}" for line, verdict in zip(lines, found, strict=True) if verdict == "FAIL"]
        counts = "".join(f"{found.count(verdict):6d}" for verdict in ("PASS", "FAIL", "INFO"))
        self.counted.append(f"{name:14s}{counts}{seconds:9.1f}")

    def close(self) -> None:
        """Pack the report, and print the failures and each list's counts of lines."""
        with tarfile.open(self.out / "report.tar.gz", "w:gz") as archive:
            archive.add(self.logs, "report")
            for name in ("machine.txt", "summary.txt", "lines.jsonl"):
                if (self.out / name).exists():
                    archive.add(self.out / name, f"report/{name}")
        print("== failures", *(line[:260] for line in self.failed[:30]), sep="\n")
        print(f"{'== list':14s}  PASS  FAIL  INFO  seconds", *self.counted, sep="\n", flush=True)


def _cards() -> int:
    """Return the number of cards that torch sees."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def _verdicts(log: Path) -> set[str]:
    return set(VERDICT.findall(log.read_text(errors="replace")))


def main() -> int:
    """Run a visit; return 0 if no check failed, 1 if one did, and MISSING if the lists would not start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "lists", nargs="*", metavar="LIST", help=f"lists to run, of {', '.join(ENTRIES)}; or only check"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="time limit of all lists, in seconds (default: %(default)s)"
    )
    options = parser.parse_args()
    names: list[str] = options.lists
    if names != ["check"] and (unknown := [name for name in names if name not in ENTRIES]):
        parser.error(f"{', '.join(unknown)}: no such list: use any of {', '.join(ENTRIES)}, or only check")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the report is packed then too
    deadline = time.monotonic() + options.limit - ENDING
    cards = _cards()
    if options.device == "cuda" and not cards:
        print(
            f"gpu.sh: {sys.executable} has no torch that sees a card: set PYTHON to another, or WITHOUT_CARD=1 to use the CPU."
        )
        return MISSING
    with tempfile.TemporaryDirectory(prefix="parallel-gpu-") as logs:
        visit = Visit(options.out, Path(logs), options.device, cards, deadline)
        if not visit.ready():
            visit.install()
            if not visit.ready():
                print("gpu.sh: the checks cannot start: see the lines above.", flush=True)
                return MISSING
        visit.describe()
        if names == ["check"]:
            return 0
        try:
            visit.run(names or (SEVERAL_CARDS if cards > 1 else ONE_CARD))
        finally:
            visit.close()
    return 1 if visit.failed else 0


if __name__ == "__main__":
    sys.exit(main())

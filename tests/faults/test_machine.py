"""Faults of the machine around the workers: full disks, removed sockets, a second ComfyUI, a killed fork server."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from parallel_backend.errors import Refused, WorkerFailed
from parallel_backend.host import Backend, Deadlines
from parallel_backend.host.workers.processes import ForkServer, ForkServerStuck
from scripts.comfyui import REPO
from tests.engine.conftest import Runner
from tests.faults.bench import AFTERWARDS, BOUND, ERROR, PLANS, Case
from tests.support.plans import cpu_plan
from tests.support.selection import thorough

RESULT = "the result"
IMPORT_BOUND = 120
"""Seconds to a result if torch and diffusers are first imported again."""

ON_A_SMALL_DISK = """
import sys, tempfile, time
from pathlib import Path
from parallel_backend.errors import Refused, WorkerFailed
from parallel_backend.host import Backend
from tests.engine.conftest import Job, Runner, sigmas
from tests.faults.bench import PLANS
from tests.support.plans import cpu_plan

def main(file, where):
    tempfile.gettempdir()
    job, run = Job(Path(file), sigmas(3), height=8, width=8), Runner(Backend())
    first = run(job, PLANS[2])
    run.backend._groups.clear()
    filler = Path(where) / "filler"
    with filler.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(bytes(4096))
        except OSError:
            pass
    started = time.monotonic()
    {middle}
    print(time.monotonic() - started)
    filler.unlink()
    assert (run(job, PLANS[2]) == first).all()
    run.close()

main(*sys.argv[1:])
"""

REFUSED = """
    try:
        run(job, PLANS[2])
        raise SystemExit("no error")
    except WorkerFailed as failure:
        print(failure)
    """


def on_a_small_disk(bench, mount: str, temporary: str, middle: str) -> tuple[str, float]:
    """Run a script in a mount namespace of its own in which a folder is a disk of 1 MB, which gets full.

    Returns:
        The script's output, and the seconds that `middle` took.
    """
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("namespaces are not permitted here")
    script = ON_A_SMALL_DISK.replace("{middle}", middle.strip("\n ") or "pass")
    command = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$4" "$1"'
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, "sh", mount, sys.executable, script, str(bench.job.path)],
        env={**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": temporary},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout, float(ran.stdout.splitlines()[-1])


@thorough  # test_causes.py has the error texts of this cause
def test_a_full_disk_is_one_error_and_the_next_run_is_right(bench, tmp_path):
    said, seconds = on_a_small_disk(bench, str(tmp_path), str(tmp_path), REFUSED)
    assert "No space left on device" in said
    assert "The disk with the temporary folder is full" in said
    bench.held("a full disk", ERROR, seconds, BOUND)


@thorough  # the test imports torch again
def test_a_full_shared_memory_does_not_disturb_loading_or_sampling(bench, tmp_path):
    """New workers load the model and sample without files in /dev/shm."""
    again = "assert (run(job, PLANS[2]) == first).all() and run(job, cpu_plan(pipefusion=2)).isfinite().all()"
    _, seconds = on_a_small_disk(bench, "/dev/shm", str(tmp_path), again)
    bench.held("a full /dev/shm", RESULT, seconds, BOUND)


def test_a_worker_that_cannot_start_a_thread_is_one_error(bench):
    bench.run.end_workers()
    bench.run(bench.job, cpu_plan(cfg=2))  # this plan has fewer connections than the next one
    victim = bench.workers()[1]
    room = victim.memory_info().vms
    victim.rlimit(psutil.RLIMIT_AS, (room, room))
    started = time.monotonic()
    with pytest.raises(
        WorkerFailed, match=r"Worker 1 of 2 .* A limit keeps a worker from starting another thread"
    ) as raised:
        bench.run(bench.job, cpu_plan(pipefusion=2))  # each connection has threads of its own
    seconds = time.monotonic() - started
    assert AFTERWARDS in str(raised.value)
    bench.assert_recovered(2)
    bench.held("no room for another thread", ERROR, seconds, BOUND)


def test_a_socket_removed_under_running_workers_disturbs_no_run(bench):
    bench.assert_right(2)
    (directory,) = bench.temporary.glob("comfyui-parallel-*")
    (directory / "socket").unlink()
    started = time.monotonic()
    bench.assert_right(2)
    bench.held("the socket is removed under running workers", RESULT, time.monotonic() - started, BOUND)


def test_a_socket_removed_while_workers_start_is_one_error(bench):
    bench.end_workers()
    case = Case(2, 1, "starting", "late")
    bench.prepare(case)

    def remove() -> None:
        while not bench.fault.struck():
            time.sleep(0.001)
        for socket in bench.temporary.glob("comfyui-parallel-*/socket"):
            socket.unlink()

    remover = threading.Thread(target=remove, daemon=True)
    remover.start()
    with pytest.raises(WorkerFailed, match="folder was removed while they started") as raised:
        bench.run(bench.job, case.plan)
    assert AFTERWARDS in str(raised.value)
    seconds = bench.fault.seconds()
    bench.assert_recovered(2)
    bench.held("the socket is removed while workers start", ERROR, seconds, BOUND)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Provide a second backend. Its fork server, which takes seconds to start, can import the module `slow_import`."""
    folder = tmp_path_factory.mktemp("slow")
    (folder / "slow_import.py").write_text("import time\nfor _ in range(20):\n    time.sleep(0.1)")
    made = Runner(Backend())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        made.backend._fork_server()
    yield made
    made.close()


def test_two_backends_do_not_disturb_each_other(bench, other):
    try:
        results = []
        thread = threading.Thread(target=lambda: results.append(other(bench.job, PLANS[2])))
        thread.start()
        bench.assert_right(2)
        thread.join()
        assert torch.equal(results[0], bench.right(2))
        bench.assert_dies(Case(2, 0, "sampling, first step", "kill"), others=2)
        assert torch.equal(other(bench.job, PLANS[2]), bench.right(2))
    finally:
        other.end_workers()
    bench.assert_right(2)


def test_a_fork_server_that_is_stuck_is_detected(tmp_path, other):
    """A server that imports modules, also from a slow disk, is active; so is a server without a request."""
    server = other.backend._fork_server()
    death_read, death_write = os.pipe()
    try:
        with pytest.raises(OSError):
            server.start(1000, tmp_path, {}, [{}], [], death_pipe=-1)
        assert not server.waited_for(), "it was not asked"
        server.check_forking(0)
        (first,) = server.start(1001, tmp_path, {}, [{}], ["slow_import"], death_read)
        check_until(server, lambda: first.poll() is not None or first.pid is not None, patience=1.5, within=60)
        psutil.Process(server._server.pid).suspend()
        (second,) = server.start(1002, tmp_path, {}, [{}], [], death_read)
        with pytest.raises(ForkServerStuck, match=r"^The process that starts the workers was stuck for 1 s"):
            check_until(server, lambda: second.poll() is not None, patience=1, within=20)
        assert server.waited_for()
    finally:
        server.close(0)
        other.backend._server = None
        os.close(death_read)
        os.close(death_write)
    assert second.poll() is not None
    assert not server.waited_for()


def check_until(server: ForkServer, done: Callable[[], bool], patience: float, within: float) -> None:
    """Check a fork server as a backend does while it waits for workers, for at most `within` seconds."""
    until = time.monotonic() + within
    while not done():
        assert time.monotonic() < until
        server.check_forking(patience)
        time.sleep(0.05)


def fork_server(bench) -> psutil.Process:
    return psutil.Process(bench.backend._server._server.pid)


@thorough  # the test imports torch again
def test_a_killed_fork_server_is_replaced_in_the_next_run(bench):
    bench.assert_right(2)
    server = fork_server(bench)
    workers = bench.workers()
    server.kill()
    started = time.monotonic()
    psutil.wait_procs(workers, timeout=5)
    assert not any(worker.is_running() for worker in workers)
    bench.assert_right(2)
    bench.held("the fork server is killed", RESULT, time.monotonic() - started, IMPORT_BOUND)


@thorough  # the test imports torch again
def test_a_stopped_fork_server_is_replaced_within_the_same_run(bench, monkeypatch):
    """Another fork server replaces the stopped one within the same prompt."""
    bench.run.end_workers()
    server = fork_server(bench)
    monkeypatch.setattr(bench.backend, "deadlines", Deadlines(silence=6))
    server.suspend()
    started = time.monotonic()
    bench.assert_right(2)
    assert not server.is_running()
    bench.held("the fork server is stopped (patience 6 s)", RESULT, time.monotonic() - started, 6 + IMPORT_BOUND)


def test_workers_start_in_an_odd_environment(bench, tmp_path, monkeypatch):
    """The environment has names and values that are not text, more bytes than a packet holds, and settings of workers
    elsewhere.
    """
    monkeypatch.setitem(os.environb, b"NAME\xff", b"value\xff")
    for number in range(3):
        monkeypatch.setenv(f"LARGE{number}", "x" * 100_000)
    monkeypatch.setenv("PARALLEL_LISTEN", "127.0.0.1:29600")
    monkeypatch.setenv("PARALLEL_MODELS", str(tmp_path))
    monkeypatch.setenv("PARALLEL_SECRET_FILE", str(tmp_path / "none"))
    bench.end_workers()
    bench.assert_right(2)


@pytest.mark.parametrize("name", ["x" * 80, "\udcff"], ids=["too long for a socket", "not UTF-8"])
def test_the_runtime_folder_is_used_if_the_temporary_folder_cannot_hold_a_socket(bench, tmp_path, monkeypatch, name):
    usual, short = tmp_path / name, tmp_path.parent
    usual.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(usual))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    bench.end_workers()
    bench.assert_right(2)
    (directory,) = short.glob("comfyui-parallel-*")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert not list(usual.iterdir())
    bench.run.end_workers()
    assert not directory.exists()


def test_a_missing_network_interface_is_refused(bench, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    bench.end_workers()
    with pytest.raises(Refused, match=r"^GLOO_SOCKET_IFNAME is 'none0' and this machine's network interfaces are .*lo"):
        bench.run(bench.job, PLANS[2])
    monkeypatch.undo()
    bench.assert_recovered(2)


@pytest.mark.parametrize("files", [3, pytest.param(5, marks=thorough), 6])
def test_a_limit_of_open_files_is_one_error(bench, files):
    """The number of files decides where in the start the limit is reached."""
    bench.run.end_workers()
    free = (number for number in itertools.count() if not Path(f"/proc/self/fd/{number}").exists())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, files, None)), limits[1]))
    try:
        with pytest.raises(WorkerFailed, match=r"Too many open files.* The limit of open files is reached"):
            bench.run(bench.job, PLANS[2])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    bench.assert_recovered(2)


def test_a_missing_temporary_folder_is_one_error(bench):
    bench.end_workers()
    ordinary, tempfile.tempdir = tempfile.tempdir, "/missing"  # a longer path would hold no socket
    try:
        with pytest.raises(
            WorkerFailed, match=r"could not be started: the temporary folder /missing does not exist"
        ) as raised:
            bench.run(bench.job, PLANS[2])
        assert "TMPDIR" in str(raised.value)
        assert "ueue" not in str(raised.value)  # queueing again would not help
    finally:
        tempfile.tempdir = ordinary
    bench.assert_recovered(2)

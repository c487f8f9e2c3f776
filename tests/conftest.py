"""Settings for all tests, the selection of the quick run, and the table of the faults that the tests held against the workers."""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from scripts import tested
from scripts.comfyui import REPO
from tests import dearest
from tests.support.page import unchanged
from tests.support.reliability import Ledger
from tests.support.side_by_side import Groups, turn

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

pytest_plugins = ("tests.support.fixtures",)
pytest.register_assert_rewrite("tests.support.graphs")  # assertions that tests share show their operands

settings.register_profile("shared machine", deadline=None)  # a busy machine is no failure
settings.load_profile("shared machine")

LEDGER = pytest.StashKey[Ledger]()
LEFT_OUT = pytest.StashKey[dict[str, int]]()
"""Reason -> number of tests that the quick run leaves out."""

THOROUGH = "that --all takes"
UNCHANGED = "of the page, which has not changed since they passed"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also what the quick run leaves out (tests/README.md)")
    parser.addoption(
        "--page-if-changed", action="store_true", help="no browser if the page has not changed (tests/README.md)"
    )
    parser.addoption(
        "--record", metavar="RUN", help="write the result of the run of this name into the table of tested versions"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEDGER] = Ledger()
    config.stash[LEFT_OUT] = {}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep all imported and collected objects out of the garbage collector, and let it run a tenth as often.

    It would otherwise take a twentieth of the run's processor time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10 * gc.get_threshold()[0], *gc.get_threshold()[1:])
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("all"):
        _leave_out(config, items, THOROUGH, lambda item: item.get_closest_marker("thorough") is not None)
    if config.getoption("page_if_changed") and unchanged.is_unchanged(REPO):
        _leave_out(config, items, UNCHANGED, unchanged.needs_the_browser)
    items.sort(key=lambda item: turn(item.nodeid, everything=config.getoption("all")))


def _leave_out(
    config: pytest.Config, items: list[pytest.Item], reason: str, is_out: Callable[[pytest.Item], bool]
) -> None:
    out = [item for item in items if is_out(item)]
    config.stash[LEFT_OUT][reason] = len(out)
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if not is_out(item)]


@pytest.fixture(scope="session")
def ledger(pytestconfig: pytest.Config) -> Ledger:
    return pytestconfig.stash[LEDGER]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: pytest.ExitCode, config: pytest.Config
) -> None:
    reports = [report for kind in tested.OUTCOMES for report in terminalreporter.getreports(kind)]
    passed = [report for report in terminalreporter.getreports("") if isinstance(report, pytest.TestReport)]
    if config.pluginmanager.hasplugin("cacheprovider") and config.cache is not None:
        tests = [report for report in (*reports, *passed) if isinstance(report, pytest.TestReport)]
        config.cache.set(dearest.CACHED, dearest.durations_of(tests))
    if table := config.stash[LEDGER].table():
        terminalreporter.section("faults held")
        terminalreporter.write_line(table)
    for reason, left_out in config.stash[LEFT_OUT].items():
        if left_out:
            terminalreporter.write_line(f"The quick run leaves out {left_out} tests {reason} (tests/README.md).")
    ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    counts = {outcome: len(terminalreporter.getreports(outcome)) for outcome in tested.OUTCOMES}
    if ended and any(counts.values()) and (run := config.getoption("record")):
        of = tested.versions(Path(os.environ["COMFYUI_PATH"]), datetime.date.today().isoformat())
        tested.record(tested.row(of, run, counts))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups:
    config.option.loadscopereorder = False  # pytest_collection_modifyitems has ordered the tests
    return Groups(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # this is one process of pytest-xdist
        session.config.workeroutput["faults held"] = session.config.stash[LEDGER].rows()
        session.config.workeroutput["left out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    said = getattr(node, "workeroutput", {})  # empty if the process crashed
    node.config.stash[LEDGER].add(said.get("faults held", []))
    node.config.stash[LEFT_OUT] = said.get("left out", node.config.stash[LEFT_OUT])

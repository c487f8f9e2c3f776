"""Settings for all tests, and the table of the faults that were held."""

import pytest
from hypothesis import settings

from tests.reliability import Ledger

settings.register_profile("shared machine", deadline=None)  # a busy machine is no failure
settings.load_profile("shared machine")

LEDGER = pytest.StashKey[Ledger]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-death", action="store_true", help="each way of dying of each rank in each phase")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEDGER] = Ledger()


@pytest.fixture(scope="session")
def ledger(pytestconfig: pytest.Config) -> Ledger:
    return pytestconfig.stash[LEDGER]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if table := config.stash[LEDGER].table():
        terminalreporter.section("faults held")
        terminalreporter.write_line(table)

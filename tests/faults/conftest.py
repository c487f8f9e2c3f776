"""One bench for all fault tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.bench import Bench
from tests.support.reliability import Ledger


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, ledger: Ledger) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("faults"), ledger)
    yield made
    made.close()

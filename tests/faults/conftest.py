"""One bench for all fault tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.bench import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("faults"))
    yield made
    made.close()

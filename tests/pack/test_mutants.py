"""Mutation testing: every planted fault is caught by the quick run's tests of its area."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.comfyui import REPO
from tests.mutants import copy_of_the_repository, run
from tests.planted_faults import MUTANTS
from tests.support.mutant import Mutant
from tests.support.selection import thorough


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_the_repository(str(tmp_path_factory.mktemp("mutants")))


def test_there_are_forty_faults_of_different_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_planted(mutant: Mutant) -> None:
    source = (REPO / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.code) == 1
    assert mutant.fault != mutant.code
    compile(source.replace(mutant.code, mutant.fault), mutant.file, "exec")
    assert all((REPO / argument).exists() for argument in mutant.tests)


@thorough
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_caught(mutant: Mutant, copied: Path) -> None:
    assert run(mutant, copied).caught_by


@thorough
def test_code_without_a_fault_is_not_caught(copied: Path) -> None:
    layout = MUTANTS[0]
    assert not run(Mutant("no fault", layout.file, layout.code, f"({layout.code})", layout.tests), copied).caught_by

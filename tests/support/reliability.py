"""A table of the fault tests: for each fault the number of cases, their time bound, and the longest time to an outcome."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class _Row:
    bound: float
    cases: int = 0
    longest: float = 0.0


class Ledger:
    """The ended cases of fault tests, printed as a table at the end of the run (docs/measured/reliability.md has one)."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], _Row] = {}

    def held(self, through: str, fault: str, outcome: str, seconds: float, bound: float) -> None:
        """Enter a case after its last check, with all promises kept. Assert that it was in time.

        Args:
            through: the nodes or program to which the faulty workers belonged.
            seconds: seconds from the fault to the outcome, at most `bound`.
        """
        assert seconds <= bound, f"{fault}: {seconds:.1f} s instead of {bound:g} s"
        row = self._rows.setdefault((through, fault, outcome), _Row(bound))
        assert row.bound == bound
        row.cases += 1
        row.longest = max(row.longest, seconds)

    def rows(self) -> list[tuple[str, str, str, float, int, float]]:
        """Return all cases so far, for the ledger of another process."""
        return [(*key, row.bound, row.cases, row.longest) for key, row in self._rows.items()]

    def add(self, rows: Iterable[tuple[str, str, str, float, int, float]]) -> None:
        """Enter another process's cases."""
        for through, fault, outcome, bound, cases, longest in rows:
            row = self._rows.setdefault((through, fault, outcome), _Row(bound))
            row.cases += cases
            row.longest = max(row.longest, longest)

    def table(self) -> str:
        """Return the table in Markdown, or an empty string if there was no case."""
        if not self._rows:
            return ""
        lines = ["| through | fault | outcome | cases | bound | longest |", "|---|---|---|---|---|---|"]
        for (through, fault, outcome), row in sorted(self._rows.items(), key=lambda item: item[0][0]):
            lines.append(f"| {through} | {fault} | {outcome} | {row.cases} | {row.bound:g} s | {row.longest:.1f} s |")
        total = sum(row.cases for row in self._rows.values())
        longest = max(row.longest for row in self._rows.values())
        return "\n".join([*lines, f"\n{total} cases, all held; the longest took {longest:.1f} s."])

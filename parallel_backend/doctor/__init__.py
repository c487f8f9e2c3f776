"""The doctor: checks each thing that the workers need on this machine, and names a remedy for each problem."""

from collections.abc import Callable

from .checks import examine
from .findings import Finding, FindingStatus
from .models import diagnose_models, of_derived
from .observations import Observations, look

__all__ = ["Finding", "FindingStatus", "Observations", "diagnose", "diagnose_models", "examine", "look", "of_derived"]


def diagnose(report: Callable[[str], None] = lambda what: None) -> list[Finding]:
    """Return all findings about this machine. This starts, measures and ends workers, in about half a minute.

    Args:
        report: called with the name of each part of the examination before it begins.
    """
    return examine(look(report))

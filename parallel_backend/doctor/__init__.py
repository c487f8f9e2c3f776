"""The doctor: looks at the machine and says of each thing that the workers need whether it is all right, or what to do."""

from collections.abc import Callable

from .checks import examine
from .findings import Finding, FindingStatus
from .models import diagnose_models, of_derived
from .observations import Observations, look

__all__ = ["Finding", "FindingStatus", "Observations", "diagnose", "diagnose_models", "examine", "look", "of_derived"]


def diagnose(report: Callable[[str], None] = lambda what: None) -> list[Finding]:
    """All findings about this machine. Workers are started, measured and ended; it takes about half a minute.

    Args:
        report: told what is being looked at, in words.
    """
    return examine(look(report))

"""Plans: the user's requested plan, its validation, and the choice of the settings that are left automatic."""

from .plan import (
    COMPILE,
    EXCHANGES,
    MAX_WORLD_SIZE,
    WEIGHTS,
    MeshCoordinates,
    ModelLimits,
    ParallelPlan,
    ResolvedPlan,
    Workload,
)
from .predict.profiles import ModelShape
from .resolve import candidates, check, feasible, resolve

__all__ = [
    "COMPILE",
    "EXCHANGES",
    "MAX_WORLD_SIZE",
    "WEIGHTS",
    "MeshCoordinates",
    "ModelLimits",
    "ModelShape",
    "ParallelPlan",
    "ResolvedPlan",
    "Workload",
    "candidates",
    "check",
    "feasible",
    "resolve",
]

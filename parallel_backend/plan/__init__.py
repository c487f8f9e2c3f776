"""Plans: what the user asks for, its one validation, and the choice of what is left automatic."""

from .plan import (
    COMPILE,
    EXCHANGES,
    MAX_WORLD_SIZE,
    WEIGHTS,
    ModelLimits,
    ParallelPlan,
    Place,
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
    "ModelLimits",
    "ModelShape",
    "ParallelPlan",
    "Place",
    "ResolvedPlan",
    "Workload",
    "candidates",
    "check",
    "feasible",
    "resolve",
]

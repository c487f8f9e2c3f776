"""Model families: one file each over diffusers' modules, and a registry."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .family import Family
from .flux import FluxFamily

FAMILIES: Mapping[str, Family] = MappingProxyType({"flux": FluxFamily()})
"""Every family the backend runs, by name."""

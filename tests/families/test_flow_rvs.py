"""FlowRVS through a real ComfyUI against its own loader: each split, a LoRA."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.family_tests import Families
from tests.support.tiny.families.wan import LAYERS


class TestVideos(Families):
    layers: ClassVar = {"flow_rvs": LAYERS}

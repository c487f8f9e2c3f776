"""The Parallel Plan node."""

from __future__ import annotations

from comfy_api.latest import io

from ..parallel_backend.attention.kernels import CHOICES
from ..parallel_backend.plan import MAX_WORLD_SIZE, ParallelPlan
from .runtime import CATEGORY

PlanType = io.Custom("PARALLEL_PLAN")
DEFAULT = ParallelPlan()


class ParallelPlanNode(io.ComfyNode):
    """Says which devices work on a model and how they share the work."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs are the fields of ParallelPlan, which holds their defaults."""
        return io.Schema(
            node_id="ParallelPlan",
            display_name="Parallel Plan",
            category=CATEGORY,
            description="Which devices work on a model, and how they share the work. Automatic where left at 0.",
            search_aliases=["multi gpu", "multigpu", "xdit", "ulysses", "ring attention", "sequence parallel"],
            inputs=[
                io.String.Input(
                    "devices",
                    default=DEFAULT.devices,
                    tooltip='"auto" takes every visible GPU; "0,1" takes GPUs 0 and 1; "0,0" runs two workers on one '
                    'GPU; "cpu:2" runs two workers on the CPU.',
                ),
                io.Int.Input(
                    "ulysses",
                    default=DEFAULT.ulysses,
                    min=0,
                    max=MAX_WORLD_SIZE,
                    tooltip="Devices that share the attention heads. Best where the links are fast; at most the model's "
                    "number of heads. 0 chooses.",
                ),
                io.Int.Input(
                    "ring",
                    default=DEFAULT.ring,
                    min=0,
                    max=MAX_WORLD_SIZE,
                    tooltip="Devices that pass keys and values round a ring. Any number; sends more than ulysses, but "
                    "while computing. 0 chooses.",
                ),
                io.Combo.Input(
                    "attention",
                    options=list(CHOICES),
                    default=DEFAULT.attention,
                    tooltip="The attention kernel: flash needs the flash-attn package and fp16 or bf16; sdpa is torch's "
                    "own; auto takes flash where it can.",
                ),
            ],
            outputs=[
                PlanType.Output(display_name="plan", tooltip="Connect it to the plan input of a Load Parallel node."),
            ],
        )

    @classmethod
    def execute(cls, devices: str, ulysses: int, ring: int, attention: str) -> io.NodeOutput:
        """The plan as given; the loader checks it against the machine and the model."""
        return io.NodeOutput(ParallelPlan(devices=devices, ulysses=ulysses, ring=ring, attention=attention))

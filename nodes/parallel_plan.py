"""The Parallel Plan node."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..parallel_backend.attention.kernels import CHOICES
from ..parallel_backend.plan import MAX_WORLD_SIZE, WEIGHTS, ParallelPlan
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
                    tooltip='"auto" takes every visible GPU that speeds the others up; "0,1" takes GPUs 0 and 1; "0,0" runs '
                    'two workers on one GPU; "cpu:2" runs two workers on the CPU; "tcp://HOST:PORT" takes workers that run '
                    "on other machines.",
                ),
                degree(
                    "cfg",
                    2,
                    "2 computes the positive and the negative prompt on different devices, with one exchange a step; "
                    "needs a sampler cfg above 1. 0 uses it where there is a negative.",
                ),
                degree(
                    "pipefusion",
                    MAX_WORLD_SIZE,
                    "Pipeline stages: each device holds only its share of the model's blocks, and patches of the picture "
                    "stream through them. Sends the least, so it suits slow links; the picture differs slightly (see "
                    "warmup_steps). 0 and 1 leave it off.",
                ),
                degree(
                    "ulysses",
                    MAX_WORLD_SIZE,
                    "Devices that share the attention heads. Best where the links are fast; at most the model's number "
                    "of heads. 0 chooses.",
                ),
                degree(
                    "ring",
                    MAX_WORLD_SIZE,
                    "Devices that pass keys and values round a ring. Any number; sends more than ulysses, but while "
                    "computing. 0 chooses.",
                ),
                degree(
                    "data",
                    MAX_WORLD_SIZE,
                    "Groups of devices that each take a part of the batch. At most the batch size. 0 and 1 leave it off.",
                ),
                io.Int.Input(
                    "patches",
                    optional=True,
                    default=DEFAULT.patches,
                    min=0,
                    max=1024,
                    tooltip="Patches that PipeFusion cuts the picture into; 0 means as many as pipefusion. The result "
                    "depends on patches and warmup_steps alone, not on the devices.",
                ),
                io.Int.Input(
                    "warmup_steps",
                    optional=True,
                    default=DEFAULT.warmup_steps,
                    min=0,
                    max=10000,
                    tooltip="First steps that PipeFusion computes whole and exactly. More steps, closer to the exact "
                    "picture; as many as the sampler's steps make it exact.",
                ),
                io.Combo.Input(
                    "weights",
                    options=list(WEIGHTS),
                    optional=True,
                    default=DEFAULT.weights,
                    tooltip="replicated: every device holds all blocks of its stage. sharded: each device holds its share "
                    "of every block and gathers the next one while computing; for models too large for one device.",
                ),
                io.Combo.Input(
                    "attention",
                    options=list(CHOICES),
                    optional=True,
                    default=DEFAULT.attention,
                    tooltip="The attention kernel: flash needs the flash-attn package and fp16 or bf16; sdpa is torch's "
                    "own; auto takes flash where it can.",
                ),
                io.String.Input(
                    "stages",
                    optional=True,
                    default=DEFAULT.stages,
                    tooltip='Blocks of each PipeFusion stage, such as "20,37", for cards of different speed or memory; empty '
                    "cuts them by measured time.",
                ),
                io.Float.Input(
                    "memory_limit",
                    optional=True,
                    default=DEFAULT.memory_limit,
                    min=0.0,
                    max=10000.0,
                    step=0.1,
                    round=False,
                    tooltip="Gigabytes that the workers may use on each device. Models that were used before make way for the "
                    "one in use, and a plan that needs more is refused. 0 allows all that is free.",
                ),
            ],
            outputs=[
                PlanType.Output(display_name="plan", tooltip="Connect it to the plan input of a Load Parallel node."),
            ],
        )

    @classmethod
    def execute(cls, **fields: Any) -> io.NodeOutput:
        """The plan as given; the loader checks it against the machine and the model."""
        return io.NodeOutput(ParallelPlan(**fields))


def degree(axis: str, most: int, tooltip: str) -> io.Int.Input:
    """The input of one mesh axis."""
    return io.Int.Input(axis, optional=True, default=getattr(DEFAULT, axis), min=0, max=most, tooltip=tooltip)

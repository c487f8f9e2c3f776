"""The Parallel Plan node."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..parallel_backend.attention.kernels import CHOICES
from ..parallel_backend.gpus import device_choices
from ..parallel_backend.plan import COMPILE, EXCHANGES, MAX_WORLD_SIZE, WEIGHTS, ParallelPlan
from ..parallel_backend.plan.plan import AUTOMATIC, PRESETS, with_preset
from .runtime import CATEGORY

PlanType = io.Custom("PARALLEL_PLAN")
DEFAULT = ParallelPlan()


class ParallelPlanNode(io.ComfyNode):
    """A node that says which devices work on a model and how they share the work."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare the fields of ParallelPlan, and the preset, as inputs.

        A new input goes to the end, because the page saves values by their order. Graphs saved before the preset, the exchange
        or compile existed therefore open unchanged.
        """
        return io.Schema(
            node_id="ParallelPlan",
            display_name="Parallel Plan",
            category=CATEGORY,
            description="Which GPUs work on a model, and how they share the work. In every field 0 means: choose for me.",
            search_aliases=[
                "multi gpu",
                "multigpu",
                "distributed",
                "speed up",
                "xdit",
                "xfuser",
                "usp",
                "pipefusion",
                "ulysses",
                "ring attention",
                "sequence parallel",
                "tensor parallel",
            ],
            inputs=[
                io.String.Input(
                    "devices",
                    default=DEFAULT.devices,
                    tooltip='"auto" takes the GPUs that are faster together; "all" takes every one; "0,1" takes GPUs 0 and 1, '
                    '"0-3" GPUs 0 to 3; "0,0" runs two workers on one GPU; "cpu:2" runs two workers on the CPU; '
                    '"tcp://HOST:PORT" takes workers that run on other machines.',
                    extra_dict={"choices": list(device_choices())},
                ),
                degree(
                    "cfg",
                    2,
                    "2 computes the positive and the negative prompt on different GPUs, with one exchange a step; needs a "
                    "sampler cfg above 1. 0 chooses, 1 is off.",
                ),
                degree(
                    "pipefusion",
                    MAX_WORLD_SIZE,
                    "Pipeline stages: each GPU holds only its share of the model's blocks, and patches of the picture stream "
                    "through them. Sends the least, so it suits slow links. It is approximate: the picture differs slightly "
                    "(see warmup_steps). 0 and 1 are off unless preset is slow links, which then chooses.",
                ),
                degree(
                    "ulysses",
                    MAX_WORLD_SIZE,
                    "GPUs that share the attention heads. Best where the links are fast; at most the model's number of "
                    "heads. 0 chooses, 1 is off.",
                ),
                degree(
                    "ring",
                    MAX_WORLD_SIZE,
                    "GPUs that pass keys and values round a ring. Any number; sends more than ulysses, but while "
                    "computing. 0 chooses, 1 is off.",
                ),
                degree(
                    "data",
                    MAX_WORLD_SIZE,
                    "Groups of GPUs that each take a part of the batch; at most the batch size. 0 chooses, 1 is off.",
                ),
                io.Int.Input(
                    "patches",
                    optional=True,
                    advanced=True,
                    default=DEFAULT.patches,
                    min=0,
                    max=1024,
                    tooltip="Patches that PipeFusion cuts the picture into. The result depends only on patches and "
                    "warmup_steps, not on the GPUs. 0 chooses: as many as pipefusion, or the picture's rows of tokens if fewer.",
                ),
                io.Int.Input(
                    "warmup_steps",
                    optional=True,
                    advanced=True,
                    default=0,
                    min=0,
                    max=10000,
                    tooltip="Number of first steps that PipeFusion computes exactly, without patches. The more, the closer to "
                    "the exact picture; as many as the sampler's steps give the exact picture. "
                    f"0 chooses: {DEFAULT.warmup_steps}.",
                ),
                io.Combo.Input(
                    "weights",
                    options=list(WEIGHTS),
                    optional=True,
                    advanced=True,
                    default=DEFAULT.weights,
                    tooltip="replicated: every GPU holds all blocks of its stage, or streams them where they do not fit (not "
                    "with pipefusion). sharded: each GPU holds its share of every block and gathers the next one while "
                    "computing; for models too large for one GPU. streamed: the blocks lie in the computer's memory, once for "
                    "all GPUs, and each is copied to the GPUs before it is needed; for models too large for all GPUs together.",
                ),
                io.Combo.Input(
                    "attention",
                    options=list(CHOICES),
                    optional=True,
                    advanced=True,
                    default=DEFAULT.attention,
                    tooltip="The attention kernel: flash needs the flash-attn package (2 or 3) and fp16 or bf16; sdpa is "
                    "torch's own; auto takes the fastest exact one that works; sage needs the sageattention package and is "
                    "approximate: faster, and the picture differs slightly.",
                ),
                io.String.Input(
                    "stages",
                    optional=True,
                    advanced=True,
                    default=DEFAULT.stages,
                    tooltip='Blocks of each PipeFusion stage, such as "20,37", for GPUs of different speed or memory. Empty '
                    "chooses: by measured time.",
                ),
                io.Float.Input(
                    "memory_limit",
                    optional=True,
                    advanced=True,
                    default=DEFAULT.memory_limit,
                    min=0.0,
                    max=10000.0,
                    step=0.1,
                    round=False,
                    tooltip="Gigabytes that the workers may use on each GPU. Models used earlier are unloaded for the "
                    "current one, and a plan that needs more is refused. 0 chooses: all that is free.",
                ),
                io.Combo.Input(
                    "preset",
                    options=list(PRESETS),
                    optional=True,
                    default=AUTOMATIC,
                    tooltip="automatic: the fastest plan that gives the same picture, with streamed weights where nothing else "
                    "fits. smallest memory: the weights lie in the computer's memory (weights streamed). slow links: also "
                    "PipeFusion, which sends the least and changes the picture slightly. The advanced inputs apply with every "
                    "preset.",
                ),
                io.Combo.Input(
                    "exchange",
                    options=list(EXCHANGES),
                    optional=True,
                    advanced=True,
                    default=DEFAULT.exchange,
                    tooltip="The type in which the GPUs exchange the tensors of attention. exact: the type of the computation. "
                    "fp8: rounded to e4m3 with a scale for each token and head, which halves the bytes, for slow links. fp8 is "
                    "approximate: the picture differs slightly, and the node says so each time.",
                ),
                io.Combo.Input(
                    "compile",
                    options=list(COMPILE),
                    optional=True,
                    advanced=True,
                    default=DEFAULT.compile,
                    tooltip="on: the workers compile the model's blocks (torch.compile with inductor), which makes steps faster. "
                    "The first run takes minutes for it. A TorchCompileModel node on the MODEL overrides this input.",
                ),
            ],
            outputs=[
                PlanType.Output(display_name="plan", tooltip="Connect it to the plan input of a Load Parallel node."),
            ],
        )

    @classmethod
    def execute(cls, preset: str = AUTOMATIC, **fields: Any) -> io.NodeOutput:
        """Return the plan of the preset and the fields. The loader later checks the plan against the machine and the model."""
        return io.NodeOutput(with_preset(preset, ParallelPlan(**fields)))


def degree(axis: str, most: int, tooltip: str) -> io.Int.Input:
    """Return the input for the degree of one mesh axis."""
    return io.Int.Input(axis, optional=True, advanced=True, default=0, min=0, max=most, tooltip=tooltip)

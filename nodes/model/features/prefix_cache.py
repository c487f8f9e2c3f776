"""ComfyUI's cache of keys and values of text and references, which QwenImage21Cache sets."""

from __future__ import annotations

from ....parallel_backend.conditioning import PREFIX_CACHE
from ....parallel_backend.errors import Refused
from ....parallel_backend.models.comfyui.content.model_code import options_read_by
from ....parallel_backend.plan import ResolvedPlan
from .feature import Feature, FeatureCall


def _refuse_quantised(call: FeatureCall, plan: ResolvedPlan) -> None:
    """Raise Refused if the model would quantise its prefix cache, and the plan uses PipeFusion, which turns the cache off.

    A quantised cache changes the picture. A run without the cache would therefore give a different picture.
    """
    option = call.options.get(PREFIX_CACHE) or {}
    dtype = option.get("dtype", "default")
    quantised = dtype != "default" and option.get("device") != "off"
    if quantised and plan.uses_pipefusion and PREFIX_CACHE in options_read_by(call.proxy.skeleton):
        raise Refused(
            f"the cache of text and references with dtype {dtype} (QwenImage21Cache) cannot be used with pipefusion "
            f"{plan.pipefusion} and patches {plan.patches}, which run without a cache: set its dtype to default, or choose "
            "pipefusion 1 and patches 1 in Parallel Plan."
        )


FEATURE = Feature(refuse=_refuse_quantised)

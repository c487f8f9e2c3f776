"""Samplers that another pack might have. Programs of `LOCAL` give ComfyUI's result; `REFUSED` has the others' reasons."""

from . import elementwise, ends, memory, model_calls, noise, whole

LOCAL = elementwise.LOCAL | noise.LOCAL | model_calls.LOCAL | memory.LOCAL | ends.LOCAL
REFUSED = whole.REFUSED | noise.REFUSED | model_calls.REFUSED | memory.REFUSED | ends.REFUSED

"""Samplers that another pack might have. `LOCAL` are those whose programs give ComfyUI's result, `REFUSED` says of others why."""

from . import elementwise, ends, memory, model_calls, noise, whole

LOCAL = elementwise.LOCAL | noise.LOCAL | model_calls.LOCAL | memory.LOCAL | ends.LOCAL
REFUSED = whole.REFUSED | noise.REFUSED | model_calls.REFUSED | memory.REFUSED | ends.REFUSED

"""Outcomes of nodes on a parallel MODEL."""

from __future__ import annotations

import re

from scripts.comfyui import REPO, QueuedRun

REFUSALS = ("Refused", "PlanRefused")
"""Names of the exception types with which this pack refuses a run."""
PAGE = REPO / "docs" / "guide" / "stock-nodes.md"
NEWER = re.compile(r"^\| (\w+) \| 0\.\d+ \| (.+) \| (.+) \|$", re.MULTILINE)
SAID = {
    "equal, in the workers' loop": "in the loop",
    "equal, one forward per model call": "one call",
    "refused": "refused",
    "ComfyUI's own fails": "not applicable",
}
"""The outcomes' names, by the wording of the page's table of newer nodes."""


def newer_nodes(on: str = "") -> dict[str, str]:
    """Return the documented outcome of each node that only newer ComfyUIs have.

    Args:
        on: name of the model that the nodes were tried on; empty for all models.
    """
    found = NEWER.findall(PAGE.read_text(encoding="utf-8"))
    return {name: SAID[said] for name, model, said in found if on in ("", model)}


def refused(name: str, run: QueuedRun) -> bool:
    """Return True if this pack refused the run, in a sentence that names the node or says "parallel MODEL"."""
    if run.error is None or run.error.exception_type not in REFUSALS:
        return False
    message = run.error.exception_message
    return message.endswith(".") and ("parallel MODEL" in message or name in message)

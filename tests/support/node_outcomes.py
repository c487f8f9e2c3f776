"""What became of a node on a parallel MODEL."""

from __future__ import annotations

import re

from scripts.comfyui import REPO, QueuedRun

REFUSALS = ("Refused", "PlanRefused")
"""What the errors are called by which this pack says no."""
PAGE = REPO / "docs" / "guide" / "stock-nodes.md"
NEWER = re.compile(r"^\| (\w+) \| 0\.\d+ \| (.+) \| (.+) \|$", re.MULTILINE)
SAID = {
    "equal, in the workers' loop": "in the loop",
    "equal, one forward per model call": "one call",
    "refused": "refused",
    "ComfyUI's own fails": "not applicable",
}
"""What the page's table of newer nodes calls the outcomes."""


def newer_nodes(on: str = "") -> dict[str, str]:
    """The outcomes of the nodes that only newer ComfyUIs have, as the page says; of those tried on one model, or all."""
    found = NEWER.findall(PAGE.read_text(encoding="utf-8"))
    return {name: SAID[said] for name, model, said in found if on in ("", model)}


def refused(name: str, run: QueuedRun) -> bool:
    """Whether this pack said no, in a sentence about the node or about what cannot be done with a parallel MODEL."""
    if run.error is None or run.error.exception_type not in REFUSALS:
        return False
    message = run.error.exception_message
    return message.endswith(".") and ("parallel MODEL" in message or name in message)

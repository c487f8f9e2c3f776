"""A real ComfyUI with its own process and base directory and with this repository as its pack, for the demo and the tests."""

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from parallel_backend.bench.client import ComfyUIError, Graph, NodeError, NodeText, QueuedRun, StepProgress
from parallel_backend.bench.server import Server, free_port

__all__ = [
    "PACKS",
    "REPO",
    "ComfyUI",
    "ComfyUIError",
    "Graph",
    "NodeError",
    "NodeText",
    "QueuedRun",
    "StepProgress",
    "free_port",
]

REPO = Path(__file__).resolve().parents[1]
PACKS = {"ComfyUI-Parallel": REPO}
"""Default custom nodes of a ComfyUI: this repository."""

_FOLDERS = (
    "models/diffusion_models",
    "models/loras",
    "models/vae_approx",
    "models/vae",
    "models/text_encoders",
)


class ComfyUI(Server):
    """A server whose `base_dir` has ComfyUI's models, input and output folders, and links to the packs in custom_nodes."""

    def __init__(
        self,
        comfyui: Path | str,
        base_dir: Path | str,
        *,
        args: Sequence[str] = ("--cpu",),
        env: Mapping[str, str] | None = None,
        packs: Mapping[str, Path] = PACKS,
        python: Path | str = sys.executable,
    ) -> None:
        super().__init__(comfyui, base_dir, args=args, env=env, python=python)
        for folder in (*_FOLDERS, "input", "output", "custom_nodes"):
            (self.base_dir / folder).mkdir(parents=True, exist_ok=True)
        for name, path in packs.items():
            link = self.base_dir / "custom_nodes" / name
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve(), target_is_directory=True)

    def add_model(self, folder: str, files: Iterable[Path]) -> None:
        """Copy files into models/`folder`. ComfyUI sees the files at once."""
        target = self.base_dir / "models" / folder
        target.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(file, target)

    def add_input(self, files: Iterable[Path]) -> None:
        """Copy files into the input folder."""
        for file in files:
            shutil.copy(file, self.input_dir)

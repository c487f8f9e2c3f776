"""Creates a Python environment with the packages of this one, but with another diffusers or none."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

IMPORTED = "diffusers was imported"


def python_with(folder: Path, diffusers: str) -> Path:
    """Create a virtual environment in `folder` and return its interpreter.

    Args:
        diffusers: version of a fake diffusers, which has metadata but fails when imported. Empty for none.
    """
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    for installed in site_packages().iterdir():
        if not is_diffusers(installed):
            (packages / installed.name).symlink_to(installed)
    if diffusers:
        metadata = packages / f"diffusers-{diffusers}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: diffusers\nVersion: {diffusers}\n")
        (packages / "diffusers.py").write_text(f"raise SystemExit({IMPORTED!r})\n")
    return folder / "bin" / "python"


def install_diffusers(python: Path) -> None:
    """Replace the diffusers of an environment from `python_with` by the installed one."""
    (packages,) = python.parents[1].glob("lib/*/site-packages")
    for pretended in packages.glob("diffusers*"):
        shutil.rmtree(pretended) if pretended.is_dir() else pretended.unlink()
    for installed in filter(is_diffusers, site_packages().iterdir()):
        (packages / installed.name).symlink_to(installed)


def site_packages() -> Path:
    return Path(sysconfig.get_path("purelib"))


def is_diffusers(path: Path) -> bool:
    return path.name == "diffusers" or path.name.startswith("diffusers-")

"""Empty packages in place of packages that ComfyUI imports and that no check uses: the page's, and the video reader."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

_ANY = '''
class Anything(type):
    """A class that has any name as a class of its kind: ComfyUI names them in annotations and tables when it is imported."""

    def __getattr__(cls, name):
        return __getattr__(name)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything(name, (), {})
'''
_TEMPLATES = '''
def iter_templates():
    """Return no templates."""
    return iter(())


def get_asset_path(template_id, filename):
    """Raise: there are no templates."""
    raise FileNotFoundError(filename)
'''
_AV = ("__init__", "container", "subtitles/__init__", "subtitles/stream", "video/__init__", "video/reformatter")

STAND_INS: Mapping[str, Mapping[str, str]] = {
    "av": {f"{name}.py": _ANY for name in _AV},
    "comfyui-frontend-package": {"__init__.py": "", "static/index.html": ""},
    "comfyui-workflow-templates": {"__init__.py": _TEMPLATES},
    "comfyui-embedded-docs": {"__init__.py": "", "docs/index.md": ""},
}
"""The files of each empty package, by path. Because `av` is empty, no check may read or write a video."""


def write_stand_ins(requirements: str, folder: Path) -> list[str]:
    """Write an empty package for each of STAND_INS that ComfyUI requires and that is not installed.

    Args:
        requirements: the text of ComfyUI's requirements.txt, which names the versions.
        folder: the folder for the packages and their metadata.

    Returns:
        The names of the packages that were written.
    """
    written = []
    for name, files in STAND_INS.items():
        required = re.search(rf"^{name}[=><~]=([\w.]+)", requirements, re.MULTILINE)
        if required is None or _is_installed(name):
            continue
        module = name.replace("-", "_")
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {required[1]}\nSummary: Empty, for checks\n"
        everything = {f"{module}/{file}": text for file, text in files.items()}
        for file, text in (everything | {f"{module}-{required[1]}.dist-info/METADATA": about}).items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        written.append(name)
    return written


@contextmanager
def stand_ins(comfyui: Path) -> Iterator[None]:
    """Make the empty packages importable in this process and in the processes that it starts.

    Args:
        comfyui: ComfyUI's folder.
    """
    with tempfile.TemporaryDirectory(prefix="parallel-stand-ins-") as folder:
        write_stand_ins((comfyui / "requirements.txt").read_text(), Path(folder))
        sys.path.append(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
        yield


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True

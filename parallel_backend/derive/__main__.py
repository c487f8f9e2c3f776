"""`python -m parallel_backend.derive FILE --comfyui DIR`: print a proved declaration of a file's model class.

The command reads no weights of the file. In a separate process, ComfyUI's own code builds a small model of the class on the
CPU, with random weights. If no declaration is proved, the command prints only the reason, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..comfyui_folder import ARGUMENTS, FOLDER
from ..plan.__main__ import memory

MEMORY = 8 * 2.0**30
MINUTES = 10.0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    line = argparse.ArgumentParser(
        prog="python -m parallel_backend.derive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    line.add_argument("file", type=Path, help="a .safetensors or .gguf file, or a diffusers folder")
    line.add_argument("--comfyui", default=os.environ.get(FOLDER, ""), help=f"ComfyUI's folder (default: ${FOLDER})")
    line.add_argument(
        "--memory",
        type=memory,
        default=MEMORY,
        help="limit of the memory for the small model's weights (default: 8GiB)",
    )
    line.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"limit of the time in minutes (default: {MINUTES:g})"
    )
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the deriving process, and return its exit code: 1 if no declaration is proved."""
    options = parser().parse_args(arguments)
    variables = {**os.environ, FOLDER: os.path.abspath(options.comfyui), ARGUMENTS: '["--cpu"]'}
    command = [sys.executable, "-m", f"{__package__}.child", str(options.file), str(options.memory)]
    with subprocess.Popen(command, env=variables, start_new_session=True) as child:
        try:
            code = child.wait(options.minutes * 60)
        except subprocess.TimeoutExpired:
            print(
                f"{options.file.name} was not derived within {options.minutes:g} minutes: raise --minutes, or write "
                "its declaration by hand (docs/develop/adding-a-model.md).",
                file=sys.stderr,
            )
            code = 1
        finally:
            _end(child)
    if code not in (0, 1):
        print(
            f"{options.file.name} was not derived, because its process ended with exit code {code}: see the output "
            "above, or lower --memory.",
            file=sys.stderr,
        )
    return 1 if code else 0


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the process and the ranks that it has forked."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main())

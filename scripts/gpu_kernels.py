"""Makes comfy-kitchen's wheel small: its library keeps only the kernels for Hopper, and shrinks from 45 MB to 4 MB.

python scripts/gpu_kernels.py WHEEL FOLDER   # writes a wheel of the same name into FOLDER
"""

from __future__ import annotations

import struct
import sys
import zipfile
from pathlib import Path

HOPPER = 90
"""The generation of Hopper cards, as the library names it."""

FATBIN = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""The beginning of a set of kernels: the magic number, the version and the header's length."""

LIBRARY, OTHER_LIBRARY = "/cuda/_C.", "/hip/_C."
"""Parts of the names of the files with kernels for NVIDIA's cards and for AMD's."""


def only_hopper(library: bytes) -> bytes:
    """Return a library of the same length without the kernels for other cards.

    Zeros fill the gaps; they compress well.

    Raises:
        ValueError: the library has no kernels for Hopper.
    """
    found, at, total = bytearray(library), library.find(FATBIN), 0
    while at >= 0:
        (size,) = struct.unpack_from("<Q", library, at + len(FATBIN))
        first = entry = at + len(FATBIN) + 8
        stays = b""
        while entry < first + size:
            head, length = struct.unpack_from("<IQ", library, entry + 4)
            if struct.unpack_from("<I", library, entry + 28) == (HOPPER,):
                stays += library[entry : entry + head + length]
            entry += head + length
        found[first : first + size] = stays + bytes(size - len(stays))
        struct.pack_into("<Q", found, at + len(FATBIN), len(stays))
        total += len(stays)
        at = library.find(FATBIN, first + size)
    if not total:
        raise ValueError("the library has no kernels for Hopper")
    return bytes(found)


def shrink(wheel: Path, folder: Path) -> None:
    """Write the wheel into a folder with the kernels for Hopper only."""
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(folder / wheel.name, "w", zipfile.ZIP_LZMA) as small:
        for name in whole.namelist():
            if OTHER_LIBRARY not in name:
                data = whole.read(name)
                small.writestr(name, only_hopper(data) if LIBRARY in name else data)


if __name__ == "__main__":
    shrink(Path(sys.argv[1]), Path(sys.argv[2]))

"""`python -m parallel_backend.doctor [--json]`: exit code 0, or 1 where something does not work."""

from __future__ import annotations

import argparse
import sys

import msgspec

from . import diagnose
from .findings import failed, table

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m parallel_backend.doctor", description="Look at this machine.")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments = parser.parse_args()
    findings = diagnose()
    print(msgspec.json.encode(findings).decode() if arguments.json else table(findings))
    sys.exit(failed(findings))

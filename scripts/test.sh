#!/usr/bin/env bash
# Runs ruff, mypy and pytest, and stops at the first that fails. Arguments go to pytest; paths are from the repo root.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

setup
setup_dev
setup_chromium
export COMFYUI_PATH CHROMIUM OMP_NUM_THREADS=1
cd -- "$REPO"

part() {
  say "$1"
  shift
  "$VENV_PYTHON" -m "$@"
}

part "ruff check" ruff check
part "ruff format" ruff format --check
part "mypy" mypy
part "pytest" pytest "$@"

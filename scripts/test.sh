#!/usr/bin/env bash
# Runs the linters, the web extension's tests (node) and pytest, and stops at the first that fails.
#
#   test.sh              the quick run: what tests/README.md says, in three processes side by side
#   test.sh --all        every test, and the exactness suite once more with the oldest diffusers
#   test.sh ARGUMENTS    these go to pytest; paths are from the repo root
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

setup
setup_dev
setup_oldest_diffusers
setup_chromium
export COMFYUI_PATH CHROMIUM OLDEST_DIFFUSERS OMP_NUM_THREADS=1
cd -- "$REPO"

part() {
  say "$1"
  shift
  "$VENV_PYTHON" -m "$@"
}

bash scripts/lint.sh
say "node: the web extension"
"$VENV/bin/node" --test "tests/web/**/*.test.js"

case "$*" in
  "") part "pytest: the quick run" pytest -n 3 ;;
  --all)
    part "pytest: every test" pytest -n 3 --all
    # In the workers, whose oracles keep the installed diffusers, and for the autoencoders in the tests' own process.
    WORKERS_DIFFUSERS="$OLDEST_DIFFUSERS" part "workers with the oldest diffusers" pytest --all -m exactness tests/engine
    PYTHONPATH="$OLDEST_DIFFUSERS" part "autoencoders with the oldest diffusers" pytest --all tests/vae/test_exact.py
    ;;
  *) part "pytest" pytest "$@" ;;
esac

#!/usr/bin/env bash
# Runs ruff, mypy and pytest, and stops at the first that fails. Arguments go to pytest; paths are from the repo root.
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

part "ruff check" ruff check
part "ruff format" ruff format --check
part "mypy" mypy
part "mypy: benchmarks" mypy -p benchmarks
# The nodes import the rest as parts of one package, which has the folder's name in ComfyUI; here it is called "pack".
ln -sfn -- "$REPO" .mypy_cache/pack
(cd .mypy_cache && part "mypy: nodes" mypy --config-file "$REPO/pyproject.toml" -p pack.nodes)
part "pytest" pytest "$@"
# The exactness suite once more with the oldest diffusers: in the workers, whose oracles keep the installed one, and for
# the autoencoders in the tests' own process.
if (($# == 0)); then
  WORKERS_DIFFUSERS="$OLDEST_DIFFUSERS" part "workers with the oldest diffusers" pytest -m exactness tests/engine
  PYTHONPATH="$OLDEST_DIFFUSERS" part "autoencoders with the oldest diffusers" pytest tests/vae/test_exact.py
fi

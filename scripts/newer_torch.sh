#!/usr/bin/env bash
# Runs the tests that depend most on torch with newer versions of torch, each in its own environment: newer_torch.sh [--record]
# [VERSION ...]. Skips a version that cannot be installed, and lists the skipped versions in the last line.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

RECORD=""
[[ "${1:-}" != --record ]] || { RECORD=yes && shift; }
(($#)) || set -- 2.14.1 2.15.0
PARTS=(tests/models tests/attention tests/comm tests/engine tests/dry)
COMPILED=(tests/engine/test_inductor.py tests/features/test_inductor.py tests/models/test_compiled.py)

tests() { # arguments: the run's name, and pytest's arguments
  say "pytest with torch $TORCH: $1"
  "$VENV_PYTHON" -m pytest ${RECORD:+--record "$1"} "${@:2}"
}

OUT=()
for TORCH in "$@"; do
  if ! (setup && setup_dev); then
    OUT+=("torch $TORCH")
    continue
  fi
  (
    setup
    export COMFYUI_PATH OMP_NUM_THREADS=1
    cd -- "$REPO"
    tests "models, attention, comm, engine, dry" -n 3 "${PARTS[@]}"
    tests "compiled" --all "${COMPILED[@]}"
  )
done
((${#OUT[@]} == 0)) || say "Left out, because it could not be installed: ${OUT[*]}."

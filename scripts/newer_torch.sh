#!/usr/bin/env bash
# Runs what hangs most on torch with newer ones than the environment's, each in an environment of its own: newer_torch.sh
# [--record] [VERSION ...]. One that cannot be installed is left out, and the last line says so.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

RECORD=""
[[ "${1:-}" != --record ]] || { RECORD=yes && shift; }
(($#)) || set -- 2.14.1 2.15.0
PARTS=(tests/models tests/attention tests/comm tests/engine tests/dry)
COMPILED=(tests/engine/test_inductor.py tests/features/test_inductor.py tests/models/test_compiled.py)

tests() { # what they are called, and what goes to pytest
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

#!/usr/bin/env bash
# Runs the linters, the web extension's tests (node) and pytest, and stops at the first that fails.
#
#   test.sh              the quick run: what tests/README.md says, in three processes side by side
#   test.sh --all        every test, the exactness suite once more with the oldest diffusers, and some with newer torch
#   test.sh ARGUMENTS    these go to pytest; paths are from the repo root
#
# In front of these may stand
#
#   --comfyui DIR        the tests run against the ComfyUI in that folder, with its requirements in an environment of its own
#   --record             the table of the README gets a row of what the run came to
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

RECORD="" OTHER=""
while [[ "${1:-}" == --comfyui || "${1:-}" == --record ]]; do
  if [[ "$1" == --record ]]; then
    RECORD=yes
  else
    is_comfyui "${2:-}" ||
      fail "--comfyui ${2:-(no folder)} is no ComfyUI, which has main.py, requirements.txt and a comfy folder: name the folder of one."
    OTHER=yes COMFYUI_PATH="$2"
    shift
  fi
  shift
done
[[ -z "$RECORD" || "$*" == "" || "$*" == --all ]] || fail "--record is for the quick run and for --all: leave out $*."

setup
setup_dev
setup_oldest_diffusers
setup_chromium
export COMFYUI_PATH CHROMIUM OLDEST_DIFFUSERS OMP_NUM_THREADS=1
cd -- "$REPO"

tests() { # what they are called, and what goes to pytest
  say "pytest: $1"
  "$VENV_PYTHON" -m pytest ${RECORD:+--record "$1"} "${@:2}"
}

if [[ -z "$OTHER" ]]; then # what does not depend on ComfyUI
  bash scripts/lint.sh
  say "node: the web extension"
  "$VENV/bin/node" --test "tests/web/**/*.test.js"
fi

case "$*" in
  "") tests "the quick run" -n 3 ;;
  --all)
    tests "every test" -n 3 --all
    # In the workers, whose oracles keep the installed diffusers, and for the autoencoders in the tests' own process.
    WORKERS_DIFFUSERS="$OLDEST_DIFFUSERS" tests "workers with the oldest diffusers" --all -m exactness tests/engine
    PYTHONPATH="$OLDEST_DIFFUSERS" tests "autoencoders with the oldest diffusers" --all tests/vae/test_exact.py
    bash scripts/newer_torch.sh ${RECORD:+--record}
    ;;
  *) tests "some tests" "$@" ;;
esac

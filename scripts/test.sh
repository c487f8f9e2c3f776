#!/usr/bin/env bash
# Runs the linters, the web extension's tests (node) and pytest, and stops at the first failure.
#
#   test.sh              the quick run (see tests/README.md), in three processes at once
#   test.sh --all        every test, the exactness suite again with the oldest diffusers, and some tests with newer torch
#   test.sh ARGUMENTS    pytest with these arguments; paths are relative to the repository's root
#
# Options before these:
#
#   --comfyui DIR        runs the tests with the ComfyUI in that folder, and with its requirements in another environment
#   --record             adds a row with the run's result to the table of docs/measured/tested.md
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

RECORD="" OTHER=""
while [[ "${1:-}" == --comfyui || "${1:-}" == --record ]]; do
  if [[ "$1" == --record ]]; then
    RECORD=yes
  else
    is_comfyui "${2:-}" ||
      fail "--comfyui ${2:-(no folder)} is not a ComfyUI folder, which has main.py, requirements.txt and a comfy folder: give the folder of a ComfyUI."
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

tests() { # arguments: the run's name, and pytest's arguments
  say "pytest: $1"
  "$VENV_PYTHON" -m pytest ${RECORD:+--record "$1"} "${@:2}"
}

if [[ -z "$OTHER" ]]; then # these do not depend on ComfyUI
  bash scripts/lint.sh
  say "node: the web extension"
  "$VENV/bin/node" --test "tests/web/**/*.test.js"
fi

case "$*" in
  "")
    tests "the quick run" -n 3 --page-if-changed
    [[ -n "$OTHER" ]] || "$VENV_PYTHON" -m tests.support.page.unchanged
    ;;
  --all)
    tests "every test" -n 3 --all
    # The first runs in workers, whose oracles keep the installed diffusers. The autoencoders run in the tests' own process.
    WORKERS_DIFFUSERS="$OLDEST_DIFFUSERS" tests "workers with the oldest diffusers" --all -m exactness tests/engine
    PYTHONPATH="$OLDEST_DIFFUSERS" tests "autoencoders with the oldest diffusers" --all tests/vae/test_exact.py
    bash scripts/newer_torch.sh ${RECORD:+--record}
    ;;
  *) tests "some tests" "$@" ;;
esac

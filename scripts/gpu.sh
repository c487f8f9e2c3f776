#!/usr/bin/env bash
# Checks on a machine with NVIDIA GPUs what is otherwise only assumed: a line each with PASS, FAIL or INFO.
#
#   bash scripts/gpu.sh               # every list, first what counts most on this number of cards
#   bash scripts/gpu.sh prompts one   # these lists alone, in this order (scripts/gpu_check/visit.py has all of them)
#   bash scripts/gpu.sh check         # whether they would start, and no more
#
# Ends within LIMIT seconds (540), but for what has to be installed first, and with 3 where something is missing. Takes PYTHON with
# torch (python3) and COMFYUI_PATH, ComfyUI's folder, which is downloaded if it is not named. gpu_on_card.sh calls this script where
# there is no network. WITHOUT_CARD=1 takes the lists through the same code on the CPU. Leaves in OUT (gpu-report) output.txt,
# summary.txt (a line a check), lines.jsonl (the same with figures), machine.txt and report.tar.gz (all of it).
set -uo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-540}
mkdir -p -- "${OUT:=gpu-report}" "$CACHE" && OUT="$(cd -- "$OUT" && pwd)" || fail "OUT=$OUT cannot be made."
find_comfyui
cd -- "$REPO"
rm -f -- "$OUT"/{output.txt,summary.txt,lines.jsonl,machine.txt,report.tar.gz} # of an earlier visit
unset PARALLEL_COMFYUI_ARGUMENTS # it would take the place of the options with which the checks start ComfyUI
export PARALLEL_COMFYUI="$COMFYUI_PATH" NCCL_DEBUG=WARN PYTHONUNBUFFERED=1
"$PYTHON" -m scripts.gpu_check.visit --out "$OUT" --limit "$LIMIT" ${WITHOUT_CARD:+--device cpu} -- "$@" 2>&1 | tee "$OUT/output.txt"

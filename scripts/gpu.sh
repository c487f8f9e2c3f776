#!/usr/bin/env bash
# Runs the checks that need NVIDIA GPUs, and prints a line for each with PASS, FAIL or INFO.
#
#   bash scripts/gpu.sh               # every list, in the order of its value on this number of cards
#   bash scripts/gpu.sh prompts one   # only these lists, in this order (scripts/gpu_check/visit.py has all of them)
#   bash scripts/gpu.sh check         # only checks that the lists would start
#
# Ends within LIMIT seconds (540), not counting installations, and exits with 3 if something is missing. Reads PYTHON, a Python
# with torch (python3), and COMFYUI_PATH, ComfyUI's folder, which is downloaded by default. gpu_on_card.sh calls this script on
# a machine without a network. WITHOUT_CARD=1 runs the lists through the same code on the CPU. Writes to OUT (gpu-report):
# output.txt, summary.txt (a line per check), lines.jsonl (the same with figures), machine.txt and report.tar.gz (all of these).
set -uo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-540}
mkdir -p -- "${OUT:=gpu-report}" "$CACHE" && OUT="$(cd -- "$OUT" && pwd)" || fail "OUT=$OUT cannot be made."
find_comfyui
cd -- "$REPO"
rm -f -- "$OUT"/{output.txt,summary.txt,lines.jsonl,machine.txt,report.tar.gz} # of an earlier visit
unset PARALLEL_COMFYUI_ARGUMENTS # would override the options with which the checks start ComfyUI
export PARALLEL_COMFYUI="$COMFYUI_PATH" NCCL_DEBUG=WARN PYTHONUNBUFFERED=1
"$PYTHON" -m scripts.gpu_check.visit --out "$OUT" --limit "$LIMIT" ${WITHOUT_CARD:+--device cpu} -- "$@" 2>&1 | tee "$OUT/output.txt"

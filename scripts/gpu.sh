#!/usr/bin/env bash
# Checks on a machine with NVIDIA GPUs what is otherwise only assumed: a line each with PASS, FAIL or INFO. At most ten minutes.
# Takes PYTHON with torch, requirements.txt and ComfyUI's requirements, and COMFYUI_PATH, ComfyUI's folder.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
PY=${PYTHON:-python3} OUT=${OUT:-gpu-report}
: "${COMFYUI_PATH:?names the folder of ComfyUI}"
export PYTHONPATH=. PARALLEL_COMFYUI=$COMFYUI_PATH PARALLEL_COMFYUI_ARGUMENTS='[]'
mkdir -p "$OUT"

nvidia-smi -q >"$OUT/smi.txt"
nvidia-smi topo -m >"$OUT/topology.txt"
GPUS=$("$PY" -c 'import torch; print(torch.cuda.device_count())')
timeout 240 "$PY" -m scripts.gpu_check one 2>&1 | tee "$OUT/one.txt"
[[ ${PIPESTATUS[0]} == 0 ]] || echo "FAIL one: it ended before its last check" | tee -a "$OUT/one.txt"
timeout 90 "$PY" -m parallel_backend.doctor --json >"$OUT/doctor.json" # workers, CUDA after fork, communicators

many() { # how kernels are loaded, then the launcher's options
  local name="many-$1"
  CUDA_MODULE_LOADING=$1 NCCL_DEBUG=WARN timeout 120 "$PY" -m torch.distributed.run --standalone "${@:2}" \
    -m scripts.gpu_check many 2>&1 | tee "$OUT/$name.txt"
  local ended=${PIPESTATUS[0]}
  ((ended != 124)) || echo "FAIL $name hangs" | tee -a "$OUT/$name.txt"
  ((ended == 0 || ended == 124)) || echo "FAIL $name: it ended before its last check" | tee -a "$OUT/$name.txt"
}
if ((GPUS > 1)); then
  many LAZY --nproc-per-node="$GPUS"
  many EAGER --nproc-per-node="$GPUS"
else
  many LAZY --nproc-per-node=2 # two ranks on one card, through host memory
fi
! grep -h FAIL "$OUT"/*.txt

#!/usr/bin/env bash
# Checks on a machine with NVIDIA GPUs what is otherwise only assumed: a line each with PASS, FAIL or INFO. At most nine minutes,
# but for what has to be installed first. Takes PYTHON with torch (python3) and COMFYUI_PATH, ComfyUI's folder, which is downloaded
# if it is not named. Where there is no network, pip takes packages from the folder that PIP_FIND_LINKS names (and PIP_NO_INDEX=1).
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
PYTHON=${PYTHON:-python3} OUT=${OUT:-gpu-report}
mkdir -p -- "$OUT" "$CACHE"
find_comfyui
export OUT COMFYUI_PATH PYTHONPATH=. PARALLEL_COMFYUI=$COMFYUI_PATH PARALLEL_COMFYUI_ARGUMENTS='[]'
PYTHONPATH=.:$COMFYUI_PATH "$PYTHON" -c 'import msgspec, comfy.sd, comfy_extras.nodes_torch_compile' 2>"$OUT/imports.txt" ||
  "$PYTHON" -m pip install --quiet -r requirements.txt -r "$COMFYUI_PATH/requirements.txt" ||
  fail "packages are missing and could not be installed: see $OUT/imports.txt, and set PIP_FIND_LINKS to a folder of wheels."

nvidia-smi -q >"$OUT/smi.txt"
nvidia-smi topo -m >"$OUT/topology.txt"
GPUS=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')

check() { # what the report is called, what its end in the middle is, the seconds it may take, and the command
  local name=$1 broken=$2 ended
  timeout "$3" "${@:4}" 2>&1 | tee "$OUT/$name.txt"
  ended=${PIPESTATUS[0]}
  ((ended != 124)) || echo "$broken $name: it hangs, or takes longer than $3 s" | tee -a "$OUT/$name.txt"
  ((ended == 0 || ended == 124)) || echo "$broken $name: it ended with $ended" | tee -a "$OUT/$name.txt"
}
RANKS=$((GPUS > 1 ? GPUS : 2)) # on one card two ranks, through host memory
SEVERAL=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$RANKS" -m scripts.gpu_check)
export NCCL_DEBUG=WARN
check connections FAIL 30 "${SEVERAL[@]}" connections # NCCL's too where ranks share a card
check many FAIL 75 env CUDA_MODULE_LOADING=LAZY "${SEVERAL[@]}" many
check pipeline FAIL 40 env CUDA_MODULE_LOADING=EAGER "${SEVERAL[@]}" pipeline    # as the launcher has stages load kernels
check pipeline-lazy INFO 25 env CUDA_MODULE_LOADING=LAZY "${SEVERAL[@]}" pipeline # whether it has to
check doctor FAIL 35 "$PYTHON" -m parallel_backend.doctor                            # workers, CUDA after fork, communicators
check one FAIL 85 "$PYTHON" -m scripts.gpu_check one
check formats FAIL 50 "$PYTHON" -m scripts.gpu_check formats
check races FAIL 30 "$PYTHON" -m scripts.gpu_check races
check prompts FAIL 105 "$PYTHON" -m scripts.gpu_check prompts
check compiled INFO 60 "$PYTHON" -m scripts.gpu_check compiled # as long as a compiler takes
tar -czf "$OUT.tar.gz" -- "$OUT" && echo "The report to send: $OUT.tar.gz"
! grep -h FAIL "$OUT"/*.txt

#!/usr/bin/env bash
# Runs scripts/gpu.sh on a machine with an NVIDIA card and no network, from the folder .gpu that gpu_prepare.sh makes. .gpu has
# a copy of this script. Installs into a temporary folder and removes it at the end. Reads PYTHON, a Python with torch
# (python3).
#
#   bash .gpu/gpu_on_card.sh               # every list; gpu.sh says which there are, what it writes to OUT and how it ends
#   bash .gpu/gpu_on_card.sh prompts one   # only these lists, in this order
#   bash .gpu/gpu_on_card.sh check         # only checks that the lists would start
#
# Ends within LIMIT seconds (540), installation included, and at once with 3 if something is missing. WITHOUT_CARD=1 runs the
# lists through the same code on the CPU.
set -uo pipefail
shopt -s nullglob
stop() {
  echo "gpu_on_card.sh: $*" >&2
  exit 3
}
GPU="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)" LIMIT=${LIMIT:-540}
[[ -f "$GPU/comfyui.tar.xz" ]] || stop "$GPU has no ComfyUI: make the folder .gpu with gpu_prepare.sh, and run the copy of this script in it."
mkdir -p -- "${OUT:=gpu-report}" && OUT="$(cd -- "$OUT" && pwd)" || stop "OUT=$OUT cannot be made."
PYTHON="$("${PYTHON:-python3}" -c 'import sys; print(sys.executable)')" || stop "there is no Python: set PYTHON to one that has torch."
BASE="$(mktemp -d -t parallel-XXXXXX)" PACK="${GPU%/*}"
trap 'rm -rf -- "$BASE"' EXIT
export OUT PYTHON TMPDIR="$BASE/tmp" HOME="$BASE/home" XDG_CACHE_HOME="$BASE/cache" COMFYUI_PATH="$BASE/comfyui"
export PYTHONPATH="$BASE/site${PYTHONPATH:+:$PYTHONPATH}" PIP_NO_INDEX=1 PIP_FIND_LINKS="$GPU/wheels" PIP_DISABLE_PIP_VERSION_CHECK=1
mkdir -p -- "$TMPDIR" "$HOME" "$XDG_CACHE_HOME" "$COMFYUI_PATH" "$BASE/site"

install() { (($# == 0)) || "$PYTHON" -m pip install -q --no-deps --no-compile --no-cache-dir --upgrade --target "$BASE/site" "$@"; }

tar -xJf "$GPU/comfyui.tar.xz" -C "$COMFYUI_PATH" &
unpacking=$!
if [[ -f "$GPU/pack.tar.xz" ]]; then
  PACK="$BASE/pack"
  mkdir -- "$PACK" && tar -xJf "$GPU/pack.tar.xz" -C "$PACK" ||
    stop "the pack could not be unpacked: copy .gpu again, and check the disk's free space."
fi
[[ -f "$PACK/scripts/gpu.sh" ]] || stop "$PACK is not the pack: copy .gpu into the pack's folder, or run gpu_prepare.sh again."
install "$GPU"/wheels/*.whl ||
  stop "the wheels could not be installed: check that $PYTHON has the PYTHON_VERSION of gpu_prepare.sh (3.12 by default), and that this machine is x86-64."
wait "$unpacking" || stop "ComfyUI could not be unpacked: copy .gpu again, and check the disk's free space."

# comfy-kitchen's library has kernels for Hopper only. Where they do not run, the plain wheel computes with torch.
if [[ -z "${WITHOUT_CARD:-}" ]] && ! timeout 60 "$PYTHON" -c '
import comfy_kitchen, torch
values = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
found = comfy_kitchen.quantize_per_tensor_fp8(values, torch.ones(1, device="cuda"))
torch.cuda.synchronize()
assert torch.allclose(found.float(), values.float(), rtol=0.07, atol=0.01)'; then
  echo "comfy-kitchen: its own kernels do not run here, so the checks use its plain wheel"
  rm -rf -- "$BASE"/site/comfy_kitchen*
  install "$GPU"/plain/*.whl || stop "the plain comfy-kitchen could not be installed: run gpu_prepare.sh again, and copy .gpu again."
fi
echo "gpu_on_card.sh: installed after $SECONDS s"
LIMIT=$((LIMIT - SECONDS)) bash "$PACK/scripts/gpu.sh" "$@"

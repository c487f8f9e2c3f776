#!/usr/bin/env bash
# Gathers the files that scripts/gpu.sh needs on a machine with an NVIDIA card and no network. The python3 of that machine has
# torch, torchvision, torchaudio, transformers and the usual packages. Run this script where there is a network.
#
#   bash scripts/gpu_prepare.sh [TREE]
#
# Makes TREE/.gpu, which .git/info/exclude ignores, with wheels, ComfyUI and gpu_on_card.sh. TREE is the git repository that
# goes to the card: by default this one. Another TREE also gets this repository's HEAD. PYTHON_VERSION (3.12) is the version on
# the card's machine. COMFYUI_PATH may name ComfyUI's folder. Prints the size at the end, and fails if TREE and .gpu together
# exceed LIMIT MiB (60).
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
TREE="$(git -C "${1:-$REPO}" rev-parse --show-toplevel)" ||
  fail "${1:-$REPO} is not a git repository: give the folder of the repository to copy to the card's machine."
LIMIT=${LIMIT:-60} PYTHON_VERSION=${PYTHON_VERSION:-3.12}
mkdir -p -- "$CACHE"
find_python
find_comfyui

GPU="$TREE/.gpu"
rm -rf -- "$GPU"
mkdir -- "$GPU" "$GPU/wheels" "$GPU/plain"
exclude="$(git -C "$TREE" rev-parse --path-format=absolute --git-path info/exclude)"
mkdir -p -- "$(dirname -- "$exclude")"
grep -qsx '/.gpu/' "$exclude" || echo '/.gpu/' >>"$exclude"

# Versions tested together with ComfyUI 0.30.0. The list omits packages that the machine has, and those that
# scripts/gpu_check/stand_ins.py replaces.
WHEELS=(alembic==1.20.1 annotated-types==0.8.0 blake3==1.0.11 "$DIFFUSERS" gguf==0.19.0 importlib-metadata==10.2.0
  lazy-importer==0.1.0 mako==1.4.3 msgspec==0.22.0 pydantic==2.14.4 pydantic-core==2.50.5 pydantic-settings==2.16.3
  python-dotenv==1.2.4 simpleeval==1.0.8 sqlalchemy==2.1.9 torchsde==0.2.6 trampoline==0.1.2 typing-inspection==0.4.5)
pinned() { sed -n "s/^\($1==[^ ;]*\).*/\1/p" "$COMFYUI_PATH/requirements.txt"; }
KITCHEN="$(pinned comfy-kitchen)" AIMDO="$(pinned comfy-aimdo)"

download() { # arguments: the folder, pip's options for the choice of wheels, and the packages
  "$PYTHON" -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$PYTHON_VERSION" -d "$@" ||
    fail "wheels for Python $PYTHON_VERSION could not be downloaded: check the network and that $PYTHON has pip."
}
compiled=(--implementation cp)
for version in 39 36 35 34 31 28 27 24 17 12 5; do compiled+=(--platform "manylinux_2_${version}_x86_64"); done
compiled+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
download "$GPU/wheels" "${compiled[@]}" "${WHEELS[@]}" "$AIMDO"
download "$GPU/plain" --implementation py --abi none --platform any "$KITCHEN" # without kernels
whole="$(mktemp -d)"
trap 'rm -rf -- "$whole"' EXIT
download "$whole" "${compiled[@]}" "$KITCHEN"
"$PYTHON" "$REPO/scripts/gpu_kernels.py" "$whole"/*.whl "$GPU/wheels"

# Leaves out tests, examples and large vocabularies of text encoders; an import needs only the small ones.
tar -cJf "$GPU/comfyui.tar.xz" -C "$COMFYUI_PATH" --exclude=__pycache__ --exclude='./.*' --exclude=./tests --exclude=./tests-unit \
  --exclude=./blueprints --exclude=./openapi.yaml --exclude=./script_examples --exclude='./custom_nodes/?*' --exclude='./models/?*' \
  --exclude='./input/?*' --exclude='./output/?*' --exclude=./user --exclude=./temp --exclude=qwen35_tokenizer/'*' --exclude=llama_tokenizer/'*' .
cp -- "$REPO/scripts/gpu_on_card.sh" "$GPU/"
[[ "$TREE" -ef "$REPO" ]] || git -C "$REPO" archive HEAD | xz -1 >"$GPU/pack.tar.xz"

mib() { awk '{ bytes += $1 } END { printf "%d\n", bytes / 1048576 + 0.99 }'; }
tree=$(cd -- "$TREE" && git ls-files -z --cached --others --exclude-standard | xargs -0 stat -c %s -- 2>/dev/null | mib || true)
ours=$(find "$GPU" -type f -printf '%s\n' | mib)
echo "$GPU: $ours MiB in $(find "$GPU" -type f | wc -l) files, and the tree has $tree MiB: $((ours + tree)) of at most $LIMIT MiB"
((ours + tree <= LIMIT)) || fail "$((ours + tree)) MiB are more than LIMIT=$LIMIT: commit less, or raise LIMIT."

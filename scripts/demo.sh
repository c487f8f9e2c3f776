#!/usr/bin/env bash
# Draws one picture with ComfyUI's own nodes, with one worker and with several, and compares the three. Asks no questions.
# Arguments go to demo.py: see demo.sh --help.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

setup
cd -- "$REPO"
exec "$VENV_PYTHON" -m scripts.demo --comfyui "$COMFYUI_PATH" --base-dir "$CACHE/demo" "$@"

#!/usr/bin/env bash
# Runs the quick run against ComfyUI's master with the newest torch, and opens an issue with what fails and what is new there, by
# the command gh. For the weekly workflow; needs git and a network.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

find_python
mkdir -p -- "$CACHE"
MASTER="$CACHE/ComfyUI-master" LOG="$CACHE/newest.log"
rm -rf -- "$MASTER"
git clone --quiet --depth 1 https://github.com/comfyanonymous/ComfyUI "$MASTER" ||
  fail "ComfyUI's master could not be fetched: check the network, then run it again."
export TORCH
TORCH="$("$PYTHON" -m pip index versions torch 2>/dev/null | sed -n '1s/^torch (\([0-9.]*\).*/\1/p')"
[[ -n "$TORCH" ]] || fail "the newest torch could not be found out: check the network, then run it again."

ended=0
bash "$REPO/scripts/test.sh" --comfyui "$MASTER" 2>&1 | tee "$LOG" || ended=$?
of="ComfyUI's master of $(git -C "$MASTER" log -1 --format=%cs) and torch $TORCH"
told="$(grep -E '^(FAILED|ERROR) |NewInComfyUI: |^test\.sh: |^=+ .*(passed|failed|error).* =+$' "$LOG" | cut -c 1-300 | head -n 200 || true)"
((ended == 0)) && [[ "$told" != *NewInComfyUI* ]] && exit
gh issue create --title "What differs with $of" --body "$(printf '%s\n\n```\n%s\n```\n' "The quick run against $of:" "$told")"

#!/usr/bin/env bash
# Compares ComfyUI's master and the newest torch with this pack: first by ComfyUI's sources, without running any
# (still_binds.py), then by the quick run. With the command gh, opens an issue that lists what does not bind, what fails and
# what is new, or rewrites the open one. For the daily workflow; needs git and a network.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

find_python
mkdir -p -- "$CACHE"
MASTER="$CACHE/ComfyUI-master" LOG="$CACHE/newest.log" PAGE="$CACHE/newest.md" ABOUT="What differs with ComfyUI's master"
rm -rf -- "$MASTER"
git clone --quiet --depth 1 https://github.com/comfyanonymous/ComfyUI "$MASTER" ||
  fail "ComfyUI's master could not be fetched: check the network, then run it again."
export TORCH
TORCH="$("$PYTHON" -m pip index versions torch 2>/dev/null | sed -n '1s/^torch (\([0-9.]*\).*/\1/p')"
[[ -n "$TORCH" ]] || fail "the newest version of torch could not be found: check the network, then run it again."

bound=0
(COMFYUI_PATH="$MASTER" && setup && cd -- "$REPO" && "$VENV_PYTHON" -m scripts.still_binds "$MASTER") >"$PAGE" || bound=$?
cat -- "$PAGE"
[[ -s "$PAGE" ]] || echo "The check of names ended with exit code $bound, so it is not known whether all names bind." >"$PAGE"

ended=0
bash "$REPO/scripts/test.sh" --comfyui "$MASTER" 2>&1 | tee "$LOG" || ended=$?
told="$(grep -E '^(FAILED|ERROR) |NewInComfyUI: |^test\.sh: |^=+ .*(passed|failed|error).* =+$' "$LOG" | cut -c 1-300 | head -n 200 || true)"
((bound == 0 && ended == 0)) && [[ "$told" != *NewInComfyUI* ]] && exit

of="$(git -C "$MASTER" log -1 --format=%cs) and torch $TORCH"
body="$(printf '%s\n\n%s\n\n```\n%s\n```\n' "$(cut -c 1-600 "$PAGE" | head -n 200)" "The quick run against ComfyUI's master of $of:" "$told")"
open="$(gh issue list --state open --search "in:title \"$ABOUT\"" --json number --jq '.[0].number // empty')"
if [[ -n "$open" ]]; then
  gh issue edit "$open" --title "$ABOUT of $of" --body "$body"
else
  gh issue create --title "$ABOUT of $of" --body "$body"
fi

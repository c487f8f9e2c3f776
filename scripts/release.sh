#!/usr/bin/env bash
# Makes a version: release.sh 1.2.3 [--tag]. The changelog's part "Unreleased" becomes the version's part, pyproject.toml gets
# the number, and the script makes an archive as the registry ships it, without tests and benchmarks. Then it runs the README's
# two commands that need only the archive: the plan, and the benchmark of the small picture. Nothing leaves this machine.
#
#   release.sh 1.2.3           all of that in a copy, to show the result
#   release.sh 1.2.3 --tag     the same, and then a commit and the tag v1.2.3 here if all passed
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

VERSION="${1:-}" TAG="${2:-}"
[[ "$VERSION" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ && ("$TAG" == "" || "$TAG" == --tag) ]] ||
  fail "write release.sh MAJOR.MINOR.PATCH, and add --tag to commit and tag."
cd -- "$REPO"
[[ -z "$(git status --porcelain)" ]] || fail "this folder has changed or new files: commit them first."
[[ -z "$(git tag --list "v$VERSION")" ]] || fail "the tag v$VERSION exists: choose another version."
[[ "$TAG" == "" ]] || git var GIT_COMMITTER_IDENT >/dev/null 2>&1 || fail "git has no committer: set user.name and user.email."
grep -q '^## Unreleased$' CHANGELOG.md || fail "CHANGELOG.md has no section Unreleased: describe the changes there."

FOLDER="$(mktemp -d)"
trap 'rm -rf -- "$FOLDER"' EXIT

# Writes the version's heading and number into a repository's folder.
write_version() {
  sed -i "s/^## Unreleased$/## $VERSION, $(date +%F)/" "$1/CHANGELOG.md"
  sed -i "s/^version = \".*\"$/version = \"$VERSION\"/" "$1/pyproject.toml"
}

# Packs git's files without those of .comfyignore, in a folder of the archive's name.
pack() {
  local name="ComfyUI-Parallel-$VERSION" archive="$REPO/dist/ComfyUI-Parallel-$VERSION.tar.gz"
  mkdir -p -- "$REPO/dist" "$FOLDER/$name"
  comm -z -23 <(git ls-files -z | sort -z) <(git ls-files -z -i -c --exclude-from=.comfyignore | sort -z) |
    tar -c --null -T - | tar -x -C "$FOLDER/$name"
  write_version "$FOLDER/$name"
  tar -czf "$archive" -C "$FOLDER" --owner=0 --group=0 "$name"
  UNPACKED="$FOLDER/unpacked"
  mkdir -- "$UNPACKED"
  tar -xzf "$archive" -C "$UNPACKED" --strip-components=1
  say "$archive: $(du -h -- "$archive" | cut -f 1), $(tar -tzf "$archive" | wc -l) files"
}

# Runs the README's commands on the unpacked archive.
try() {
  say "The plan command, with msgspec alone"
  "$PYTHON" -m venv "$FOLDER/venv" && "$FOLDER/venv/bin/python" -m pip install --quiet msgspec ||
    fail "msgspec could not be installed: check the network, then run it again."
  (cd -- "$UNPACKED" && "$FOLDER/venv/bin/python" -m parallel_backend.plan --model wan2.2-14b --card 3090)
  setup
  say "The benchmark, in ComfyUI"
  mkdir -- "$FOLDER/out"
  (cd -- "$UNPACKED" && "$VENV_PYTHON" -m parallel_backend.bench --steps 4 --comfyui "$COMFYUI_PATH" --out "$FOLDER/out")
  "$VENV_PYTHON" - "$FOLDER/out" <<'PYTHON' || fail "a latent differs from ComfyUI's own, or a run failed: see the table above."
import json, pathlib, sys

(file,) = pathlib.Path(sys.argv[1]).glob("*.json")
sides = json.loads(file.read_text())["sides"]
sys.exit(any(side["failed"] or (side["devices"] and not side["error"] <= 1e-5) for side in sides))
PYTHON
}

find_python
pack
try
if [[ "$TAG" == --tag ]]; then
  write_version "$REPO"
  git commit --quiet -m "Version $VERSION" -- CHANGELOG.md pyproject.toml
  git tag -a "v$VERSION" -m "$VERSION"
  say "Committed and tagged v$VERSION; to publish: git push --follow-tags, and comfy node publish."
fi

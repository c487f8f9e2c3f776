#!/usr/bin/env bash
# Checks the Python code (ruff, mypy) and the web extension (Biome, TypeScript) and stops at the first failure:
# lint.sh [check] [format] [types] [web]; all four without arguments.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

setup
setup_dev
cd -- "$REPO"

# The tools' caches lie next to the environment, where the next checkout in this place finds them.
LINTED="$CACHE/linted-$(pwd | sha256sum | cut -c 1-12)"
export MYPY_CACHE_DIR="$LINTED/mypy" RUFF_CACHE_DIR="$LINTED/ruff"

part() {
  say "$1"
  shift
  "$VENV_PYTHON" -m "$@"
}

check() { part "ruff check" ruff check; }

format() { part "ruff format" ruff format --check; }

types() {
  # The nodes import the rest as parts of one package, named after the folder in ComfyUI; here it is called "pack".
  mkdir -p -- "$LINTED/packages"
  ln -sfn -- "$REPO" "$LINTED/packages/pack"
  local nodes="$LINTED/nodes.txt" # these are checked in the background: they take as long as the rest
  (cd -- "$LINTED/packages" && MYPY_CACHE_DIR="$LINTED/mypy-nodes" part "mypy: nodes" \
    mypy --config-file "$REPO/pyproject.toml" -p pack.nodes) >"$nodes" 2>&1 &
  local beside=$! failed=0
  local helpers=() file # of the tests; mypy skips the tests themselves and their packs, which only run
  while read -r file; do
    file="${file%.py}" && helpers+=(-m "${file//\//.}")
  done < <(find tests -name "*.py" -not -name "test_*" -not -path "*_pack/*" | sort)
  part "mypy" mypy || failed=1
  part "mypy: benchmarks and the tests' helpers" mypy -p benchmarks "${helpers[@]}" || failed=1
  wait "$beside" || failed=1
  cat -- "$nodes"
  return "$failed"
}

web() {
  setup_web
  local tools="$WEB_TOOLS/node_modules"
  PATH="$VENV/bin:$PATH"
  say "biome"
  "$tools/.bin/biome" check
  say "tsc"
  "$tools/.bin/tsc" --project tsconfig.json --typeRoots "$tools/@types"
}

(($#)) || set -- check format types web
for each in "$@"; do
  case "$each" in
    check | format | types | web) "$each" ;;
    *) fail "$each is not an argument: use check, format, types or web." ;;
  esac
done

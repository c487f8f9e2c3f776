#!/usr/bin/env bash
# Writes the repository's public address into the registry's metadata and the README: address.sh https://HOST/OWNER/NAME
# The address is the Repository in pyproject.toml; all other addresses derive from it.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

new="${1:?the address, such as https://HOST/OWNER/NAME}"
if [[ ! "$new" =~ ^https://[A-Za-z0-9._~/-]+[A-Za-z0-9_~-]$ ]]; then
  echo "'$new' is not an address: write https://HOST/OWNER/NAME" >&2
  exit 1
fi
old="$(sed -n 's/^Repository = "\(.*\)"$/\1/p' pyproject.toml)"
sed -i "s|${old//./\\.}|$new|g" pyproject.toml README.md

#!/bin/bash
# What `make test` needs beyond .venv: Debian packages, where this machine lets us install them. What cannot be is named, with the reason.
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -t wanted < <(sed 's/#.*//' molecule/rig/debian-packages.txt tests/debian-packages.txt | tr -d ' ' | grep .)
missing=()
for package in "${wanted[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ "${#missing[@]}" -gt 0 ] || exit 0
if ! command -v apt-get >/dev/null; then
  echo "setup: not a Debian machine; not installed: ${missing[*]} (tests that need them are skipped by name)"
elif [ "$(id -u)" != 0 ]; then
  echo "setup: not root; not installed: ${missing[*]} (apt-get install them; tests that need them are skipped by name)"
else
  echo "setup: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; }
fi

#!/bin/bash
# pytest with a private HOME: nothing of the user's own Ansible is read or written. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export HS_CACHE=${HS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang-hidden-states}
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
export HOME=$home ANSIBLE_HOME=$home/.ansible PATH=$PWD/.venv/bin:$PATH
.venv/bin/python -m pytest -q -ra "$@"

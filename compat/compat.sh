#!/bin/bash
# `python -m compat` in the engine's Python of the cache (it has torch), which is built first where it is missing. Arguments: releases.
set -euo pipefail
cd "$(dirname "$0")/.."
export HS_CACHE=${HS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang-hidden-states}
if [ ! -e "$HS_CACHE/engine/venv/bin/python" ]; then
  echo "compat: building the engine in the cache" >&2
  PATH=$PWD/.venv/bin:$PATH ANSIBLE_HOME=$PWD/.ansible ansible-playbook -i inventory/local playbooks/local_engine.yml >&2
fi
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
exec "$HS_CACHE/engine/venv/bin/python" -m compat "$@"

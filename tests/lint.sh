#!/bin/bash
# All linters, offline. Exceptions stand, with their reasons, in pyproject.toml, .ansible-lint and .yamllint.
set -euo pipefail
cd "$(dirname "$0")/.."
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
export HOME=$home ANSIBLE_HOME=$home/.ansible PATH=$PWD/.venv/bin:$PATH
ruff check --quiet .
ruff format --quiet --check .
mypy module_utils files/engine library action_plugins callback_plugins lookup_plugins filter_plugins demo compat bench docs molecule/rig tests/unit tests/e2e tests/campaign
mypy tests/matrix.py tests/docs_text.py tests/documented.py
yamllint --strict .
ansible-lint --offline -q
# what is written from the roles, and what ansible-doc shows of everything that has a name
python docs/generate.py --check
python tests/documented.py
if command -v shellcheck >/dev/null; then shellcheck demo/*.sh compat/*.sh bench/run tests/*.sh .ci/run; else echo "lint: shellcheck is not installed, the shell scripts were not checked"; fi
echo "lint: clean"

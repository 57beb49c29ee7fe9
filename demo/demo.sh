#!/bin/bash
# The whole story on this machine: a real SGLang server on the CPU is taken out of production, hands over its states, comes back.
# Called by `make demo`, which made .venv. Safe to repeat, also after a Ctrl-C at any point.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
# Ansible's own files stay in this checkout
export ANSIBLE_HOME="$PWD/.ansible"
local_dir=${HS_LOCAL_DIR:-$PWD/.local}
port=${HS_LOCAL_PORT:-32100}
began=$SECONDS

say() { printf '\n== %s\n' "$*"; }
play() { ansible-playbook -i inventory/local "$@"; }

say "engine: a real SGLang and a tiny Kimi-K2.5 (built once, in the cache)"
play playbooks/local_engine.yml
source_file=$("$local_dir/engine/bin/python" -c 'import importlib.util as u; print(u.find_spec("sglang").submodule_search_locations[0])')/srt/models/deepseek_v2.py

if [ -e "$local_dir/state/journal.json" ]; then
  say "a run is still open (interrupted?): extract.yml goes on with it, or waits for its restore"
  python demo/production.py wait-for-restore "$local_dir/state"
fi
if [ ! -e "$local_dir/state/journal.json" ]; then
  say "production: a server started by hand"
  python demo/production.py start "$local_dir" "$port"
  # the samples of the last demo would leave nothing to do
  rm -rf "$local_dir/samples"
  sha256sum "$source_file" > "$local_dir/pristine.sha256"
fi

say "ansible-playbook playbooks/extract.yml -i inventory/local"
extract_began=$EPOCHREALTIME
play playbooks/extract.yml
extract_took=$(echo "$EPOCHREALTIME $extract_began" | awk '{print $1 - $2}')

say "the samples"
"$local_dir/engine/bin/python" demo/show_samples.py "$local_dir/samples"
python demo/production.py check "$port"
python demo/production.py own-time "$local_dir/state" "$extract_took"
sha256sum --check --quiet "$local_dir/pristine.sha256"
count=$(find "$local_dir/samples/hidden_states" -name 'hs_*.safetensors' | wc -l)
printf '\n%s s; production goes on serving on port %s (make demo-stop ends it)\n' "$((SECONDS - began))" "$port"
echo "demo: $count samples in $local_dir/samples; production answers; engine source unchanged"

"""Everything of the project that has a name is shown by ansible-doc: modules, actions, callback, filters, lookup, roles. For tests/lint.sh."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def names() -> dict[str, list[str]]:
    """Type of plugin -> its names, as the folders have them."""
    filters = re.findall(r'"(hs_\w+)": ', "".join(path.read_text() for path in (REPO / "filter_plugins").glob("*.py")))
    found = {
        folder.removesuffix("_plugins"): sorted(
            path.stem for path in (REPO / folder).glob("*.py") if path.stem != "__init__"
        )
        for folder in ("callback_plugins", "lookup_plugins", "library", "action_plugins")
    }
    # an action is documented by the module of its name
    modules = sorted(set(found.pop("library")) | set(found.pop("action")))
    roles = sorted(path.name for path in (REPO / "roles").iterdir() if path.is_dir())
    return {"module": modules, "filter": filters, **found, "role": roles}


def main() -> int:
    """Name what is not documented."""
    bad = []
    for kind, wanted in names().items():
        words = ["ansible-doc", "-t", kind, "--json", *(["-r", "roles"] if kind == "role" else []), *wanted]
        done = subprocess.run(words, cwd=REPO, capture_output=True, text=True)
        shown = json.loads(done.stdout) if done.returncode == 0 else {}
        bad += [f"{kind} {name}: {done.stderr.strip()}" for name in wanted if not shown.get(name)]
    print("\n".join(bad), file=sys.stderr, end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

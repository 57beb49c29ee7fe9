"""Runs the commands that the pages print, on the local inventory, with the replacements that docs/README.md names."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_host import CACHE, REPO, Host, Played

sys.path.insert(0, str(REPO / "tests"))

import docs_text

ROWS = 8


@dataclass
class Pages:
    """``extra``: what every playbook gets with -e; ``output``: what /data/hidden-states stands for."""

    host: Host
    output: Path
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def engine_python(self) -> Path:
        """The Python that serves production."""
        return self.host.folder / "engine/bin/python"

    def replaced(self, text: str) -> str:
        """As printed, with the real host's names replaced by this machine's."""
        for name, here in (
            ("-i inventory/rtx6000bw", "-i inventory/local"),
            ("--limit rtx6000bw", "--limit localhost"),
            ("/var/lib/sglang-hs", str(self.host.state)),
            ("/data/hidden-states", str(self.output)),
            ("/data/sglang_hs", str(self.host.folder / "dumps")),
            ("/opt/sglang/bin/python", str(self.engine_python)),
            ("hs_extraction_port=31001", f"hs_extraction_port={self.host.port + 2}"),
        ):
            text = text.replace(name, here)
        return text

    def doc(
        self,
        text: str,
        extra: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        check: bool = False,
        **fill: Any,
    ) -> Played:
        """Run a command that a page prints, to its end; ``fill``: words in capitals, filled in; ``check``: only up to what it would do."""
        assert text in {command.text for command in docs_text.commands()}, f"no page prints {text}"
        words = self.replaced(text)
        for name, value in fill.items():
            words = words.replace(name, str(value))
        if docs_text.program(text) == "ansible-playbook":
            words += " --check" if check else ""
            words += f" -e '{json.dumps({**self.extra, **(extra or {})})}'"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", words],
            cwd=REPO,
            env={**self.host.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        return Played(done.returncode, done.stdout)

    def good(self, text: str, changed: bool | None = None, **more: Any) -> str:
        """:meth:`doc`, which must end with 0 (and, for a playbook, with changes or without); its output in one line."""
        # the name is not `doc`'s own: tests/unit/test_docs.py finds both
        played = self.doc(text, **more)
        assert played.code == 0, played.out
        if changed is not None:
            assert (played.recap("changed") > 0) == changed, played.out
        assert "\x1b[" not in played.out, "colours though there is no terminal"
        return " ".join(played.out.split())


def few_rows(folder: Path, count: int = ROWS) -> Path:
    """The first rows of the local engine's data set."""
    path = folder / f"rows{count}.jsonl"
    lines = (CACHE / "engine/dataset.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:count]))
    return path


def told(host: Host, extra: dict[str, Any]) -> tuple[Played, dict[str, Any]]:
    """Run the play that tags.md prints after extract.yml, which also writes hs_result down; the fact."""
    book, out = host.folder / "tell.yml", host.folder / "result.json"
    text = docs_text.block("playbooks/tell.yml").replace(
        "import_playbook: extract.yml", f"import_playbook: {REPO}/playbooks/extract.yml"
    )
    text += (
        "\n    - name: Write it down\n      ansible.builtin.copy:\n"
        f'        content: "{{{{ hs_result | to_json }}}}"\n        dest: "{out}"\n        mode: "0600"\n'
    )
    book.write_text(text)
    words = [host.command("extract")[0], str(book), "-i", "inventory/local", "-e", json.dumps(extra)]
    done = subprocess.run(
        words, cwd=REPO, env=host.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    return Played(done.returncode, done.stdout), json.loads(out.read_text()) if out.exists() else {}

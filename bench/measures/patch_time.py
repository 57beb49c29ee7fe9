"""How long the edit of the newest deepseek_v2.py takes: source_patch against ansible's own blockinfile, run as Ansible runs them.

Ansible itself makes the file that it would send to a host (an AnsiballZ archive with the arguments in it), once for each
module; that file is then run again and again, in turns, each time on the pristine source. So both pay the same for the
start of Python and of Ansible's module code, which the empty module ``ping`` shows alone.

The edit alone, in one process, is told beside.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.frame import ROOT, Figure, Goal, Place, rounds
from compat import edit, wheels

PYTHON = "controller"
ORDER = 120
REPEATS = 25
LINES = edit.variants()[0]["edits"][0]["lines"]


def newest() -> str:
    """The last release of compat/releases.txt."""
    return (ROOT / "compat" / "releases.txt").read_text().split()[-1]


class Bench:
    """A source to be edited again and again. scratch: a folder for everything."""

    def __init__(self, source: bytes, scratch: Path) -> None:
        self.source = source
        self.file = scratch / "site" / "deepseek_v2.py"
        self.backup = scratch / "backup"
        self.scratch = scratch
        self.file.parent.mkdir()

    def pristine(self) -> None:
        """Put the source back as it was, without backups."""
        shutil.rmtree(self.file.parent)
        shutil.rmtree(self.backup, ignore_errors=True)
        self.file.parent.mkdir()
        self.file.write_bytes(self.source)

    def arguments(self) -> dict[str, dict[str, Any]]:
        """Module -> its arguments. blockinfile inserts the same lines and keeps a backup too."""
        where = {"insertbefore": r"^    def get_input_embeddings\(", "marker": "# {mark} source_patch", "block": LINES}
        return {
            "source_patch": {"path": str(self.file), "backup_dir": str(self.backup), "variants": edit.variants()},
            "ansible.builtin.blockinfile": {"path": str(self.file), "backup": True, **where},
            "ansible.builtin.ping": {},
        }

    def archives(self) -> dict[str, Path]:
        """Module -> the file that Ansible made of it and its arguments."""
        self.pristine()
        remote = self.scratch / "remote"
        tasks = [{name: arguments} for name, arguments in self.arguments().items()]
        variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        playbook = self.scratch / "playbook.json"
        playbook.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "vars": variables, "tasks": tasks}]))
        environment = {
            **os.environ,
            "HOME": str(self.scratch),
            "ANSIBLE_HOME": str(self.scratch / "ansible"),
            "ANSIBLE_KEEP_REMOTE_FILES": "1",
            "ANSIBLE_REMOTE_TEMP": str(remote),
            "ANSIBLE_LIBRARY": str(ROOT / "library"),
            "ANSIBLE_MODULE_UTILS": str(ROOT / "module_utils"),
        }
        words = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", str(playbook)]
        done = subprocess.run(words, env=environment, cwd=self.scratch, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit("ansible-playbook failed:\n" + done.stdout[-2000:] + done.stderr[-2000:])
        found = {}
        for name in self.arguments():
            (found[name],) = remote.rglob("AnsiballZ_{}.py".format(name.split(".")[-1]))
        return found

    def module(self, archive: Path, changes: bool) -> float:
        """Seconds of one run of a module. changes: whether it must change the file."""
        self.pristine()
        began = time.perf_counter()
        done = subprocess.run([sys.executable, str(archive)], capture_output=True, text=True)
        took = time.perf_counter() - began
        if done.returncode != 0 or (self.file.read_bytes() != self.source) != changes:
            raise RuntimeError(f"{archive.name} did not do its work:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return took

    def core(self) -> float:
        """Seconds of plan and apply in this process."""
        self.pristine()
        began = time.perf_counter()
        edit.source_edit.apply(edit.source_edit.plan(str(self.file), edit.variants(), str(self.backup)))
        return time.perf_counter() - began


def run(place: Place) -> Iterator[Figure]:
    """Each run, in turns."""
    release = newest()
    source = (wheels.get([release])[release] / wheels.DEEPSEEK).read_bytes()
    bench = Bench(source, place.disk)
    archives = bench.archives()

    def side(name: str) -> Callable[[], float]:
        return lambda: bench.module(archives[name], not name.endswith("ping"))

    ours, theirs, ping, alone = rounds(
        REPEATS, side("source_patch"), side("ansible.builtin.blockinfile"), side("ansible.builtin.ping"), bench.core
    )
    count = source.count(b"\n")
    note = f"deepseek_v2.py of sglang {release}, {count:,} lines"
    empty = f"{note}; ping, which does nothing, takes {statistics.median(ping):.3f} s; the edit alone {statistics.median(alone):.3f} s"
    yield place.absolute("patch_time", "s", ours, Goal("at most", 0.3), note=empty)
    yield place.ratio(
        "patch_time, to blockinfile", "s", ours, theirs, Goal("at most", 1.5), "ansible's blockinfile", note=note
    )

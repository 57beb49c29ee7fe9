"""How long the edit of the newest deepseek_v2.py takes: source_patch against ansible's own blockinfile, run as Ansible runs them.

Ansible itself makes the file that it would send to a host (an AnsiballZ archive with the arguments in it), once for each
module; that file is then run again and again, in turns, each time on the pristine source. So both pay the same for the
start of Python and of Ansible's module code, which the empty module ``ping`` shows alone.

    .venv/bin/python bench/patch_time.py [--repeats 25]

Exit status 1 if a goal is missed: the median at most LIMIT_S, and at most LIMIT_RATIO times blockinfile's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from compat import edit, wheels  # noqa: E402 - they lie beside, not in a package

LIMIT_S = 0.3
LIMIT_RATIO = 1.5
LINES = edit.variants()[0]["edits"][0]["lines"]


def newest() -> str:
    """The last release of compat/releases.txt."""
    return (ROOT / "compat" / "releases.txt").read_text().split()[-1]


class Took(NamedTuple):
    """Seconds: by the clock, and of processor time."""

    wall: float
    cpu: float


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

    def arguments(self) -> Dict[str, Dict[str, Any]]:
        """Module -> its arguments. blockinfile inserts the same lines and keeps a backup too."""
        where = {"insertbefore": r"^    def get_input_embeddings\(", "marker": "# {mark} source_patch", "block": LINES}
        return {
            "source_patch": {"path": str(self.file), "backup_dir": str(self.backup), "variants": edit.variants()},
            "ansible.builtin.blockinfile": {"path": str(self.file), "backup": True, **where},
            "ansible.builtin.ping": {},
        }

    def archives(self) -> Dict[str, Path]:
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

    def module(self, archive: Path, changes: bool) -> Took:
        """One run of a module. changes: whether it must change the file."""
        self.pristine()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        done = subprocess.run([sys.executable, str(archive)], capture_output=True, text=True)
        wall = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode != 0 or (self.file.read_bytes() != self.source) != changes:
            sys.exit("{} did not do its work:\n{}{}".format(archive.name, done.stdout[-2000:], done.stderr[-2000:]))
        return Took(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    def core(self) -> Took:
        """Plan and apply in this process."""
        self.pristine()
        began, before = time.perf_counter(), time.process_time()
        edit.source_edit.apply(edit.source_edit.plan(str(self.file), edit.variants(), str(self.backup)))
        return Took(time.perf_counter() - began, time.process_time() - before)


def measure(repeats: int) -> Dict[str, List[Took]]:
    """Each run, in turns."""
    release = newest()
    source = (wheels.get([release])[release] / wheels.DEEPSEEK).read_bytes()
    print(
        "deepseek_v2.py of sglang {}, {} lines; {} runs of each, in turns".format(release, source.count(b"\n"), repeats)
    )
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(source, Path(folder))
        archives = bench.archives()
        runs: Dict[str, Callable[[], Took]] = {
            name: partial(bench.module, path, not name.endswith("ping")) for name, path in archives.items()
        }
        runs["plan and apply alone, in one process"] = bench.core
        times: Dict[str, List[Took]] = {name: [] for name in runs}
        for number in range(repeats + 1):
            for name, run in runs.items():
                took = run()
                if number:  # the first of each warms the caches
                    times[name].append(took)
    return times


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25)
    times = measure(parser.parse_args().repeats)
    print(("{:<38}" + "{:>9}" * 5).format("seconds", "median", "fastest", "slowest", "spread", "cpu"))
    medians = {}
    for name, values in times.items():
        walls = [value.wall for value in values]
        medians[name] = statistics.median(walls)
        quarters = statistics.quantiles(walls, n=4)
        row = [medians[name], min(walls), max(walls), quarters[2] - quarters[0]]
        row.append(statistics.median(value.cpu for value in values))
        print("{:<38}".format(name) + "".join("{:>9.3f}".format(value) for value in row))
    ours, theirs = medians["source_patch"], medians["ansible.builtin.blockinfile"]
    print("spread: from the first to the third quarter; ping: what the start of any module takes")
    print(
        "source_patch {:.3f} s (goal {:.1f}), {:.2f} times blockinfile (goal {:.1f})".format(
            ours, LIMIT_S, ours / theirs, LIMIT_RATIO
        )
    )
    return 0 if ours <= LIMIT_S and ours <= LIMIT_RATIO * theirs else 1


if __name__ == "__main__":
    sys.exit(main())

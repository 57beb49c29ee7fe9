"""The project under every ansible-core from 2.17 on that a Python of this machine can run.   make test-matrix [RELEASES="2.17 2.20"]

Each release gets a virtual environment of its own in the cache. There run: the unit tests that call Ansible, the syntax check of every
playbook for both inventories, `extract.yml --check --diff`, and a short real story (extract, extract again, restore) against one real
server of the local inventory that all releases share. A deprecation or any other warning of Ansible's is a failure too. A run over all
releases writes docs/ansible-versions.md. The exit status is 1 if anything failed anywhere.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "module_utils"), str(ROOT / "tests/e2e")]

from docs_run import ROWS, few_rows, told  # noqa: E402
from local_host import CACHE, Host, Played, end_host  # noqa: E402

DOCUMENT = ROOT / "docs/ansible-versions.md"
LOWEST = (2, 17)
OLDEST_PYTHON = 10  # 3.10 is the oldest that ansible-core 2.17 runs on
BOOKS = sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml"))
INVENTORIES = ("local", "rtx6000bw")
# the unit tests in which Ansible itself does something: it runs a playbook, reads documentation, loads a plugin
UNIT = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "tests/unit").glob("test_*.py")
    if re.search(r"ansible-(playbook|doc)|ansible\.(plugins|module_utils|errors)", path.read_text())
    and path.name != "test_docs.py"  # reads pages
)
# Ansible says in so many words that it has nothing to do with the project
NOT_OURS = ("Platform linux on host", "The default interpreter at")


def pythons() -> dict[tuple[int, int], str]:
    """{(3, minor): path} of the Pythons that start and can make an environment: of PATH, and of pyenv's folder, whose shims name it."""
    places = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    roots = {place.parent for place in places if place.name == "shims"} | {
        Path(os.environ.get("PYENV_ROOT", "/nowhere"))
    }
    places += sorted(folder / "bin" for root in roots for folder in root.glob("versions/*"))
    found: dict[tuple[int, int], str] = {}
    code = "import ensurepip, ssl, sqlite3, venv"
    for place in places:
        for path in sorted(place.glob("python3.*")):
            minor = int(path.name[8:]) if re.fullmatch(r"python3\.\d+", path.name) else 0
            if minor < OLDEST_PYTHON or (3, minor) in found:
                continue
            done = subprocess.run([str(path), "-c", code], capture_output=True, text=True)
            if done.returncode == 0:  # a shim of a version that is not chosen ends with 127
                found[(3, minor)] = str(path)
    return dict(sorted(found.items()))


def offered(python: str) -> dict[tuple[int, int], str]:
    """{(2, minor): newest release of it} of ansible-core that pip would install under this Python."""
    words = [python, "-m", "pip", "index", "versions", "ansible-core", "--disable-pip-version-check"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"matrix: {python} cannot ask for the releases of ansible-core: {done.stderr.strip()[-300:]}")
    listed = re.search(r"Available versions: (.*)", done.stdout)
    newest: dict[tuple[int, int], str] = {}
    for release in listed.group(1).split(", ") if listed else []:  # newest first
        parts = release.split(".")
        if all(part.isdigit() for part in parts):
            newest.setdefault((int(parts[0]), int(parts[1])), release)
    return newest


def pairs() -> list[tuple[str, str]]:
    """(ansible-core, Python) to try: each release with the oldest Python that takes it, the newest one also with the newest Python."""
    chosen: dict[tuple[int, int], tuple[str, str]] = {}
    last: tuple[str, str] | None = None
    for python in pythons().values():
        takes = offered(python)
        for minor, release in takes.items():
            if minor >= LOWEST:
                chosen.setdefault(minor, (release, python))
        if takes and max(takes) >= LOWEST and max(takes) >= max(chosen):
            last = (takes[max(takes)], python)
    if not chosen:
        raise SystemExit(f"matrix: no Python of this machine can run ansible-core {LOWEST[0]}.{LOWEST[1]} or later")
    tried = [chosen[minor] for minor in sorted(chosen)]
    return tried + ([last] if last and last not in tried else [])


def environment(release: str, python: str) -> Path:
    """The folder of a virtual environment with that ansible-core and pytest; made once. Its stamp is written last."""
    pins = dict(re.findall(r"(?m)^([\w-]+)==(\S+)", (ROOT / "requirements-dev.txt").read_text()))
    folder = CACHE / "ansible" / f"{release}-{Path(python).name}"
    stamp = folder / "stamp"
    if not stamp.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"ansible-core=={release}", f"pytest=={pins['pytest']}"], check=True)
        stamp.write_text(release + "\n")
    return folder


@dataclass
class Tried(Host):
    """The local inventory's host, played by the ansible-playbook of one environment."""

    venv: Path = field(default_factory=Path)

    @property
    def env(self) -> dict[str, str]:
        """As an operator has it; deprecations are told."""
        words = {"ANSIBLE_DEPRECATION_WARNINGS": "true", "NO_COLOR": "1"}
        return {**super().env, **words, "PATH": f"{self.venv}/bin:{os.environ['PATH']}"}

    def command(self, book: str, *words: str, inventory: str = "local") -> list[str]:
        """This environment's ansible-playbook."""
        return [str(self.venv / "bin/ansible-playbook"), *super().command(book, *words, inventory=inventory)[1:]]


@dataclass
class Row:
    """What one release did; ``failures``: name and last words of what went wrong."""

    release: str
    python: str
    unit: str = ""
    syntax: str = ""
    check: str = "not run"
    story: str = "not run"
    failures: list[tuple[str, str]] = field(default_factory=list)

    def failed(self, what: str, words: str) -> str:
        """Note it; the cell of the table."""
        self.failures.append((what, words))
        return "**failed**"


def warnings(out: str) -> list[str]:
    """Ansible's own warnings in an output."""
    found = re.findall(r"(?m)^\[(?:DEPRECATION WARNING|WARNING|ERROR)\].*", out)
    return [line for line in found if not any(words in line for words in NOT_OURS)]


def judge(row: Row, what: str, played: Played, wanted: str = "", changed: bool | None = None) -> bool:
    """Whether it ended well, said ``wanted``, changed something or nothing, and no warning came."""
    told = warnings(played.out)
    said = wanted in " ".join(played.out.split())
    fits = changed is None or (played.code == 0 and (played.recap("changed") > 0) == changed)
    if played.code == 0 and said and fits and not told:
        return True
    row.failed(what, "\n".join(told) or played.out[-3000:])
    return False


def unit(row: Row, venv: Path) -> None:
    """The unit tests in which Ansible works."""
    with tempfile.TemporaryDirectory() as home:
        report = Path(home) / "junit.xml"
        env = {key: word for key, word in os.environ.items() if not key.startswith("ANSIBLE_")}
        env.update(HOME=home, ANSIBLE_HOME=f"{home}/.ansible", PATH=f"{venv}/bin:{env['PATH']}", HS_CACHE=str(CACHE))
        words = [str(venv / "bin/python"), "-m", "pytest", "-q", f"--junit-xml={report}", *UNIT]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
        suite = next(ET.parse(report).getroot().iter("testsuite")) if report.exists() else None
        if done.returncode != 0 or suite is None:
            row.unit = row.failed("unit tests", done.stdout[-4000:] + done.stderr[-500:])
            return
        skipped = int(suite.attrib["skipped"])
        row.unit = f"{int(suite.attrib['tests']) - skipped} passed" + (f", {skipped} skipped" if skipped else "")


def syntax(row: Row, host: Tried) -> None:
    """Every playbook, for both inventories."""
    good = 0
    for book in BOOKS:
        for inventory in INVENTORIES:
            done = subprocess.run(
                host.command(book, "--syntax-check", inventory=inventory),
                cwd=ROOT,
                env=host.env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
            good += judge(row, f"syntax of {book}.yml", Played(done.returncode, done.stdout + done.stderr))
    row.syntax = f"{good} of {len(BOOKS) * len(INVENTORIES)}"


def story(row: Row, host: Tried, dataset: Path) -> None:
    """Look, extract, extract again, restore; production is the same server before and after."""
    extra = {"hs_dataset": str(dataset), "hs_output_dir": str(host.folder / "out" / host.venv.name)}
    before = host.signature()
    looked = judge(row, "--check", host.play("extract", "--check", "--diff", extra=extra), "_hs_capture.attach", True)
    row.check = "yes" if looked and host.signature() == before else "**failed**"
    played, result = told(host, extra)
    good = judge(row, "extract.yml", played, "hs_result", True)
    if (result.get("outcome"), result.get("samples")) != ("complete", ROWS):  # a number, not its text
        row.failed("hs_result", str(result))
        good = False
    good &= judge(row, "extract.yml again", host.play("extract", extra=extra), "nothing to do", False)
    good &= judge(row, "restore.yml", host.play("restore"), "", False)
    try:
        host.assert_back(before)
    except AssertionError as error:
        row.failed("production is back", str(error)[-3000:])
        good = False
    row.story = f"{ROWS} samples" if good else "**failed**"


def document(rows: list[Row]) -> str:
    """docs/ansible-versions.md."""
    good = sum(not row.failures for row in rows)
    lines = [
        "# Releases of ansible-core",
        "",
        f"Written by `make test-matrix`; not by hand. Right with **{good} of {len(rows)}**. The project needs no collection beyond `ansible.builtin`.",
        "",
        f"- **unit tests**: those in which Ansible works: {', '.join(f'`{Path(path).name}`' for path in UNIT)}.",
        f"- **syntax**: `--syntax-check` of {len(BOOKS)} playbooks for {len(INVENTORIES)} inventories.",
        "- **check**: `extract.yml --check --diff` shows the edit and changes nothing.",
        f"- **story**: `extract.yml` takes {ROWS} samples from a real server of the local inventory, `extract.yml` again and `restore.yml` change",
        "  nothing, and production is the same server before and after.",
        "",
        "A warning of Ansible's own, deprecations among them, counts as a failure.",
        "",
        "| ansible-core | Python | unit tests | syntax | check | story |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.release} | {row.python} | {row.unit} | {row.syntax} | {row.check} | {row.story} |" for row in rows
    ]
    for row in rows:
        for what, words in row.failures:
            lines += ["", f"{row.release}, {what}:", "", *(f"    {line}" for line in words.splitlines()[-12:])]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Try what is asked for."""
    parser = argparse.ArgumentParser(description="the project under every ansible-core that this machine can run")
    parser.add_argument(
        "minors", nargs="*", help="2.17, 2.20, ...; none: all, and the table is written (with --no-story it says so)"
    )
    parser.add_argument("--no-story", action="store_true", help="leave out what needs a real server")
    parser.add_argument("--list", action="store_true", help="only say what would be tried")
    given = parser.parse_args()
    tried = [pair for pair in pairs() if not given.minors or ".".join(pair[0].split(".")[:2]) in given.minors]
    if given.list or not tried:
        print("\n".join(f"{release} {python}" for release, python in tried) or "matrix: no such release here")
        return 0 if tried else 1
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="hs-matrix-") as scratch:
        folder = Path(scratch)
        (folder / "home").mkdir()
        dataset = Path()
        host: Tried | None = None
        try:
            for release, python in tried:
                venv = environment(release, python)
                row = Row(release, Path(python).name.replace("python", ""))
                rows.append(row)
                player = Tried(folder, 1, port=host.port, venv=venv) if host else Tried(folder, 1, venv=venv)
                unit(row, venv)
                syntax(row, player)
                if not given.no_story:
                    if host is None:
                        host = Tried(folder, 1, port=player.port, venv=Path(sys.prefix))
                        built = host.play("local_engine")
                        assert built.code == 0, built.out
                        host.start_production()
                        dataset = few_rows(folder)
                    story(row, player, dataset)
                print(f"{release} on Python {row.python}: {'FAILED' if row.failures else 'right'}", flush=True)
                for what, words in row.failures:
                    print(f"  {what}:\n{words}", flush=True)
        finally:
            if host is not None:
                end_host(host)
    if not given.minors:
        DOCUMENT.write_text(document(rows))
        print(f"written: {DOCUMENT.relative_to(ROOT)}")
    return 1 if any(row.failures for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

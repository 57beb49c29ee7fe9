"""Writes what the documents take from the roles: docs/variables.md, the end of each role's README, docs/img/layers.svg.

    .venv/bin/python docs/generate.py [--check]

Sources: each role's meta/argument_specs.yml (type, default, choices, description), the headings in its defaults/main.yml, the tags
that playbooks give it. With --check nothing is written; what is not up to date is named, and the exit status is 1.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from layers_picture import picture

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- from here on written by docs/generate.py -->"


def load(path: Path) -> Any:
    """A YAML file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def roles() -> list[str]:
    """Names of all roles."""
    return sorted(path.parent.parent.name for path in ROOT.glob("roles/*/meta/argument_specs.yml"))


def entries(role: str) -> dict[str, dict[str, Any]]:
    """Entry point -> its specification."""
    found: dict[str, dict[str, Any]] = load(ROOT / "roles" / role / "meta/argument_specs.yml")["argument_specs"]
    return found


def cell(value: Any) -> str:
    """Text for a cell of a table: one line, no bar."""
    return " ".join(str(value).split()).replace("|", "\\|")


def default(spec: dict[str, Any]) -> str:
    """The default as it would be written in an inventory."""
    if spec.get("required"):
        return "must be given"
    value = spec.get("default")
    if value is None:
        return ""
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    return f"`{cell(text)}`"


def kind(spec: dict[str, Any]) -> str:
    """Type, and what may be chosen."""
    name = str(spec.get("type", "str"))
    if spec.get("elements"):
        name = f"{name} of {spec['elements']}"
    if spec.get("choices"):
        name += ": " + ", ".join(f"`{choice}`" for choice in spec["choices"])
    return cell(name)


def table(options: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown table of options."""
    rows = ["| variable | type | default | meaning |", "|---|---|---|---|"]
    for name, spec in options.items():
        meaning = spec["description"] if isinstance(spec["description"], str) else " ".join(spec["description"])
        rows.append(f"| `{name}` | {kind(spec)} | {default(spec)} | {cell(meaning)} |")
    return rows


def walk(tasks: list[dict[str, Any]], above: frozenset[str] = frozenset()) -> Iterator[tuple[str, str, frozenset[str]]]:
    """(role, entry point, tags) of every import_role and include_role below ``tasks``."""
    for task in tasks:
        words = task.get("tags", [])
        tags = above | frozenset([words] if isinstance(words, str) else words)
        for key in ("block", "rescue", "always"):
            yield from walk(task.get(key, []), tags)
        given = task.get("ansible.builtin.import_role") or task.get("ansible.builtin.include_role")
        if given:
            yield given["name"], given.get("tasks_from", "main"), tags


def tags_of(role: str) -> list[str]:
    """One line for each playbook that has the role."""
    lines = []
    for book in sorted(ROOT.glob("playbooks/*.yml")):
        for play in load(book):
            for name, entry, tags in walk(play.get("tasks", [])):
                if name == role:
                    named = ", ".join(f"`{tag}`" for tag in sorted(tags - {"always"})) or "no tag of its own"
                    entry_words = "" if entry == "main" else f" (`tasks_from: {entry}`)"
                    also = ", runs with any tag" if "always" in tags else ""
                    lines.append(f"- `playbooks/{book.name}`{entry_words}: {named}{also}")
    return lines or ["- no playbook has it"]


def readme(role: str) -> str:
    """The role's README: what a person wrote, then tags and variables."""
    path = ROOT / "roles" / role / "README.md"
    kept = path.read_text(encoding="utf-8").partition(BEGIN)[0].rstrip()
    lines = [kept, "", BEGIN, "", "## Tags", "", *tags_of(role), "", "## Variables", ""]
    shown: list[tuple[list[str], list[str]]] = []  # (entry points, table); equal ones together
    for entry, spec in entries(role).items():
        rows = table(spec.get("options") or {})
        for names, known in shown:
            if known == rows:
                names.append(entry)
                break
        else:
            shown.append(([entry], rows))
    for names, rows in shown:
        if len(entries(role)) > 1:
            lines += [f"Entry point{'s' * (len(names) > 1)} {', '.join(f'`{name}`' for name in names)}:", ""]
        lines += rows if len(rows) > 2 else ["None."]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def headings(role: str) -> dict[str, str]:
    """Variable -> the heading above it in defaults/main.yml, empty where there is none."""
    found, heading = {}, ""
    for line in (ROOT / "roles" / role / "defaults/main.yml").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"# -- (.*?) -+$", line):
            heading = match.group(1)
        elif match := re.match(r"(\w+):", line):
            found[match.group(1)] = heading
    return found


def variables() -> str:
    """docs/variables.md."""
    lines = [
        "# Variables",
        "",
        "Written by `docs/generate.py` from the roles' argument specifications; not by hand. An operator sets these in the inventory",
        "(`inventory/rtx6000bw/group_vars/sglang.yml`) or with `-e`. `preflight` fixes all of a run's; the run's journal keeps them.",
        "A value of the wrong type or an unknown choice is refused before anything is asked of the host.",
    ]
    seen: dict[str, str] = {}
    order = ["preflight", *(role for role in roles() if role not in ("preflight", "local_engine")), "local_engine"]
    for role in order:
        options: dict[str, dict[str, Any]] = {}
        for spec in entries(role).values():
            options.update(spec.get("options") or {})
        mine = {name: spec for name, spec in options.items() if name not in seen}
        also = [name for name in options if name in seen]
        seen.update(dict.fromkeys(mine, role))
        lines += [
            "",
            f"## {role}",
            "",
            f"[roles/{role}](../roles/{role}/README.md): {entries(role)['main']['short_description']}.",
        ]
        if also:
            lines += ["", "It also reads " + ", ".join(f"`{name}`" for name in also) + " (above)."]
        known = headings(role)
        for heading in dict.fromkeys(known.get(name, "") for name in mine):
            part = {name: spec for name, spec in mine.items() if known.get(name, "") == heading}
            lines += ["", *([f"### {heading}", ""] if heading else []), *table(part)]
    return "\n".join(lines) + "\n"


def wanted() -> dict[Path, str]:
    """Every file that is written here, with its text."""
    files = {ROOT / "roles" / role / "README.md": readme(role) for role in roles()}
    files[ROOT / "docs/variables.md"] = variables()
    files[ROOT / "docs/img/layers.svg"] = picture()
    return files


def main(words: list[str]) -> int:
    """Write, or with --check only look."""
    stale = [path for path, text in wanted().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if "--check" in words:
            print(f"{path.relative_to(ROOT)} is not up to date: run .venv/bin/python docs/generate.py", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted()[path], encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")
    return 1 if stale and "--check" in words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

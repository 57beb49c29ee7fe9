"""Filter: the page of a run's document (module_utils/sglang_hs/report.py gathers it), one HTML file that needs nothing beside it.

An environment of its own, not Ansible's: it escapes every value, as row numbers and reasons are whatever the data set's author wrote.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

import jinja2

REPOSITORY = Path(__file__).resolve().parent.parent
SCHEMAS = (1,)
# the block of docs/formats.md that loads a format, by its first line
PRINTED = {"native": "speculators-0.9", "speculators-pt": "speculators-0.7", "specforge": "specforge", "modelopt": "modelopt"}  # fmt: skip
PLACE = "/data/hidden-states"  # the folder of that page's examples
OUTCOMES = {
    "complete": ("good", "Complete"),
    "window": ("warn", "Cut by its window"),
    "stopped": ("warn", "Stopped"),
    "open": ("warn", "Still open"),
    "unknown": ("warn", "Its end is not known"),
    "canary_refused": ("bad", "Refused by the canary"),
    "error_budget": ("bad", "Too many samples failed"),
    "failed": ("bad", "Failed"),
}


def _charts() -> Mapping[str, Callable[..., Any]]:
    """The filters of hs_charts.py beside this file; Ansible loads plugins by their files, so there is no package to import it from."""
    spec = importlib.util.spec_from_file_location("hs_charts_of_report", Path(__file__).with_name("hs_charts.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Callable[..., Any]] = module.FilterModule().filters()
    return found


def shell(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """A command as one would type it: variables, then one option a line."""
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in sorted((environment or {}).items())]
    line: list[str] = []
    for word in argv:
        # an option; neither Python's -m nor a negative number is one
        if re.match(r"--\w|-(?!m$)[a-zA-Z]", str(word)) and line:
            lines.append(" ".join(line))
            line = []
        line.append(shlex.quote(str(word)))
    lines += [" ".join(line)] if line else []
    return " \\\n  ".join(lines)


def loading(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How to load each format that the run was made for: {format, folder, code, export: does it take playbooks/export.yml first}."""
    text = (REPOSITORY / "docs/formats.md").read_text(encoding="utf-8")
    place = str(document["output"]["path"])
    found = []
    for name in document["formats"] or ["native"]:
        block = re.search(rf"```python\n# {re.escape(PRINTED.get(name, name))}\n(.*?)```", text, re.S)
        if block:
            export = name != "native"
            folder = f"{place}-{name}" if export else place
            # as a Python literal: the path may hold a quote
            code = re.sub(
                rf'"{PLACE}([^"/]*)(/[^"]*)?"', lambda part: repr(place + part[1] + (part[2] or "")), block[1]
            )
            found.append({"format": name, "folder": folder, "code": code.strip(), "export": export})
    return found


def page(document: Mapping[str, Any], host: str = "") -> str:
    """The whole page. ``host``: its name in the inventory. ValueError for a document of another schema."""
    if document.get("schema_version") not in SCHEMAS:
        raise ValueError(
            f"the document has schema {document.get('schema_version')!r}, this checkout makes pages of {SCHEMAS}"
        )
    frame = jinja2.Environment(
        loader=jinja2.FileSystemLoader(REPOSITORY / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    frame.filters.update(_charts(), hs_shell=shell)
    kind, outcome = OUTCOMES.get(document["run"]["outcome"], ("bad", document["run"]["outcome"]))
    return frame.get_template("report.html.j2").render(
        d=document, host=host or document["host"]["name"], kind=kind, outcome=outcome, loading=loading(document)
    )


class FilterModule:
    """hs_report_page."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names of the filters."""
        return {"hs_report_page": page}

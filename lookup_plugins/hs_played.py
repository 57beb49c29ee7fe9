"""Lookup: the command that started this ansible-playbook, without its secrets, so that a report can say how to do it again."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = r"""
name: hs_played
short_description: Tell how this ansible-playbook was started
description:
  - Its words with the values of secret options and variables hidden, the folder it was started in, and the inventories.
options:
  _terms: {description: None are taken., required: false}
"""

EXAMPLES = r"""
- ansible.builtin.debug:
    msg: "{{ lookup('hs_played').argv | join(' ') }}"
"""

RETURN = r"""
_raw: {description: 'One object: argv, cwd, inventory.', type: list, elements: dict}
"""


def _secrets() -> ModuleType:
    """The target's own idea of a secret: plugins on the controller cannot import module_utils of a project by name."""
    path = Path(__file__).resolve().parent.parent / "module_utils/sglang_hs/secrets.py"
    spec = importlib.util.spec_from_file_location("hs_secrets_of_played", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_secrets(argv: list[str]) -> list[str]:
    """``argv`` with secret options and the values of secret variables in -e hidden. What cannot be read as variables is hidden whole."""
    secrets = _secrets()
    shown: list[str] = secrets.command_line(argv)
    for index, word in enumerate(shown):
        if index and shown[index - 1] in ("-e", "--extra-vars"):
            shown[index] = _variables(word, secrets)
        elif word.startswith("--extra-vars="):
            shown[index] = "--extra-vars=" + _variables(word.partition("=")[2], secrets)
        elif re.match(r"-e.", word):
            shown[index] = "-e" + _variables(word[2:], secrets)
    return shown


def _variables(text: str, secrets: ModuleType) -> str:
    if text.startswith("@"):
        return text  # a file's name
    if text.lstrip()[:1] in ("{", "["):
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError:
            return str(secrets.HIDDEN)
        return json.dumps(_hidden(found, secrets))
    # name=value pairs, values perhaps in quotes
    pair = re.compile(r"""([\w.-]+)=("[^"]*"|'[^']*'|\S*)""")
    named = {match[1]: match[2] for match in pair.finditer(text)}
    kept = secrets.environment(named)
    return pair.sub(
        lambda match: f"{match[1]}={kept[match[1]]}" if kept[match[1]] == secrets.HIDDEN else match[0], text
    )


def _hidden(value: Any, secrets: ModuleType) -> Any:
    if isinstance(value, dict):
        names = secrets.environment({str(name): "" for name in value})
        return {
            name: secrets.HIDDEN if names[str(name)] == secrets.HIDDEN else _hidden(part, secrets)
            for name, part in value.items()
        }
    return [_hidden(part, secrets) for part in value] if isinstance(value, list) else value


class LookupModule(LookupBase):
    """hs_played."""

    def run(self, terms: list[str], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        """One object: argv, cwd, inventory."""
        argv = [Path(sys.argv[0]).name, *sys.argv[1:]]
        sources = [str(source) for source in (variables or {}).get("ansible_inventory_sources") or []]
        return [{"argv": without_secrets(argv), "cwd": os.getcwd(), "inventory": sources}]

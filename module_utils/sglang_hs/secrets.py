"""What is written down for people must hold no secrets: keys on a command line, tokens in an environment."""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, Sequence

HIDDEN = "(hidden)"
_OPTION = re.compile(r"--(?:admin-)?api-key|--ssl-keyfile-password|--.*(?:password|secret|token)")
_VARIABLE = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(?:^|_)KEY(?:$|_)|APIKEY", re.IGNORECASE)
# options that carry the word and no secret
_HARMLESS = re.compile(
    r"--(?:skip-)?tokenizer.*|--(?:max|num|chunk|min|stream|prefill|decode)-.*tokens?.*|--.*-tokens?-.*"
)


def command_line(argv: Sequence[str]) -> List[str]:
    """``argv`` with the values of secret options hidden."""
    shown = list(argv)
    for index, word in enumerate(shown):
        name, equals, _ = word.partition("=")
        if not _OPTION.fullmatch(name) or _HARMLESS.fullmatch(name):
            continue
        if equals:
            shown[index] = "{}={}".format(name, HIDDEN)
        elif index + 1 < len(shown) and not shown[index + 1].startswith("--"):
            shown[index + 1] = HIDDEN
    return shown


def environment(variables: Mapping[str, str]) -> Dict[str, str]:
    """``variables`` with the values of secret ones hidden."""
    return {name: HIDDEN if _VARIABLE.search(name) else value for name, value in variables.items()}

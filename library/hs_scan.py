#!/usr/bin/python
"""Ansible module: look through the data set and the room there is. Reads only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_scan
short_description: Check a data set of prompts and whether its states fit on the host
description:
  - Reads every row, names those that are no valid samples, counts tokens and what an earlier run already extracted, and compares
    the bytes to come with the room on the disk and in the dump folder.
  - Run it with the engine's own Python (C(ansible_python_interpreter)), which reads Parquet and arrow data sets.
  - Reads only, in check mode and out of it.
options:
  settings: {description: The settings that M(hs_preflight) returned in its view., type: dict, required: true}
  skip_bad_rows: {description: Go without rows that are no valid samples., type: bool, default: false}
  disk_reserve_gb: {description: Disk to leave free (10^9 bytes)., type: float, default: 20}
  share:
    description:
      - The host's part of the data set, as M(hs_divide) wrote it. The data set itself is then not read; it was when it was divided.
      - Empty means that all of it is the host's.
    type: str
    default: ''
  attached: {description: An open run is gone on with; there is work in any case., type: bool, default: false}
attributes:
  check_mode: {support: full, description: Reads only.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Look through the data set
  hs_scan:
    settings: "{{ hs_found.view.settings }}"
  vars:
    ansible_python_interpreter: "{{ hs_found.view.settings.engine_python }}"
  register: hs_data
"""

RETURN = r"""
work: {description: Whether anything is left to do., type: bool, returned: always}
samples: {description: Valid samples., type: int, returned: always}
tokens: {description: Their tokens., type: int, returned: always}
done: {description: Samples that an earlier run extracted., type: int, returned: always}
done_tokens: {description: Their tokens., type: int, returned: always}
done_bytes: {description: Bytes of their files., type: int, returned: always}
bytes: {description: Bytes of states that are left to write., type: int, returned: always}
bad_total: {description: Rows left out., type: int, returned: always}
hist: {description: 'Length histogram: upper edge in tokens to number of samples.', type: dict, returned: always}
lengths: {description: The histogram as lines of text., type: list, elements: str, returned: always}
line: {description: One line on the data set., type: str, returned: always}
time_line: {description: One line on the time that it will take., type: str, returned: always}
arrow: {description: Whether this Python can write the arrow data set beside the states., type: bool, returned: always}
space_line: {description: One line on the room., type: str, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import plan  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """Look."""
    given = module.params
    found = plan.look(given["settings"], given["skip_bad_rows"], given["disk_reserve_gb"] * 1e9, given["share"])
    found["work"] = found["work"] or given["attached"]
    return dict(found, changed=False)


def main() -> None:
    """Entry point."""
    run(
        {
            "settings": {"type": "dict", "required": True},
            "skip_bad_rows": {"type": "bool", "default": False},
            "disk_reserve_gb": {"type": "float", "default": 20},
            "share": {"type": "str", "default": ""},
            "attached": {"type": "bool", "default": False},
        },
        work,
    )


if __name__ == "__main__":
    main()

#!/usr/bin/python
"""Ansible module: write a finished extraction in a trainer's format."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_export
short_description: Write a finished extraction in a trainer's format
description:
  - Runs the exporter on the host, in the Python that served the engine, beside production that serves again; refuses while a run is open.
  - Each sample is checked against the manifest's checksum while it is read, and each file written is whole or absent.
  - A file that is there is verified by its checksum and not made again, so a broken export is gone on with by running it again.
options:
  state_dir: {description: Folder of the journal and of the installed programs on the host., type: path, required: true}
  output_dir: {description: Folder that the extraction wrote., type: path, required: true}
  format: {description: The format., type: str, choices: [native, speculators-pt, specforge, modelopt], required: true}
  to: {description: Folder of the export; made where it is missing. Not used by native., type: path, default: ''}
  final: {description: Final state where the format takes either; empty for the format's own., type: str, default: ''}
  python: {description: The engine's Python; empty for the one that the output's manifest names., type: str, default: ''}
attributes:
  check_mode: {support: full, description: 'Says how many files are missing, by name and size.'}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Export for SpecForge
  hs_export:
    state_dir: /var/lib/sglang-hs
    output_dir: /data/hidden-states
    format: specforge
    to: /data/hidden-states-specforge
"""

RETURN = r"""
line: {description: The result as one line., type: str, returned: always}
written: {description: Files written (in check mode, to be written)., type: int, returned: always}
verified: {description: Files that were there, as they should be., type: int, returned: when the exporter ran}
mended: {description: Files that were there and damaged., type: int, returned: when the exporter ran}
left_out: {description: Rows of the data set that are in quarantine., type: int, returned: when the exporter ran}
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import export  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """Export, or say what is missing."""
    given = module.params
    result = export.call(
        given["state_dir"],
        given["output_dir"],
        given["format"],
        given["to"],
        given["final"],
        given["python"],
        module.check_mode,
    )
    return dict(result, changed=bool(result["written"] or result.get("described")))


def main() -> None:
    """Entry point."""
    run(
        {
            "state_dir": {"type": "path", "required": True},
            "output_dir": {"type": "path", "required": True},
            "format": {
                "type": "str",
                "choices": ["native", "speculators-pt", "specforge", "modelopt"],
                "required": True,
            },
            "to": {"type": "path", "default": ""},
            "final": {"type": "str", "default": ""},
            "python": {"type": "str", "default": ""},
        },
        work,
    )


if __name__ == "__main__":
    main()

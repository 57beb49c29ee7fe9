#!/usr/bin/python
"""Ansible module: what this host has finished of a data set. Reads only. The action of the same name keeps it on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_catalogue
short_description: Take a host's catalogue of finished samples
description:
  - Reads the book of the output folder and says which samples are done, with their sizes and checksums; counted is what is there in its size.
  - Refuses a folder that was made by another engine release, model, data set or with other boundaries than a run would use now.
  - The catalogue goes into a folder on the controller, also in check mode; nothing is changed on the host.
options:
  dir: {description: Folder on the controller that keeps the catalogues., type: path, required: true}
  host: {description: Name of the host in the inventory., type: str, required: true}
  output_dir: {description: The output folder., type: path, required: true}
  state_dir: {description: Folder of the journal on the host., type: path, required: true}
  settings: {description: 'The settings that M(hs_preflight) returned in its view; without them the book alone is asked.', type: dict, default: {}}
  keep: {description: 'The host was not refused: keep it with the others'' of its data set at once.', type: bool, default: false}
  dataset_sha256:
    description: Of the data set, where it does not lie on the host yet; else the host's own is read.
    type: str
    default: ''
attributes:
  check_mode: {support: full, description: Reads only.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Take the catalogue
  hs_catalogue:
    dir: /home/me/fleet
    host: "{{ inventory_hostname }}"
    output_dir: /data/hidden-states
    state_dir: /var/lib/sglang-hs
    settings: "{{ hs_found.view.settings }}"
"""

RETURN = r"""
samples: {description: Finished samples., type: int, returned: always}
tokens: {description: Their tokens., type: int, returned: always}
identity: {description: What the samples are made from., type: dict, returned: always}
catalogue: {description: All of it as one line of text; the action takes it out., type: str, returned: always}
"""

from pathlib import Path  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import catalogue, dataset, model  # noqa: E402
from ansible.module_utils.sglang_hs.errors import HsError  # noqa: E402
from ansible.module_utils.sglang_hs.journal import SHARE, Journal, Paths  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """Look."""
    given = module.params
    settings = given["settings"]
    now = {}
    if settings:
        now = {
            "dataset_sha256": given["dataset_sha256"] or dataset.digest(settings["dataset"]),
            "cut_to": settings["cut_to"],
            "model": model.fingerprint(Path(settings["model"]["path"])),
            "hidden_size": settings["model"]["hidden_size"],
            "boundaries": settings["boundaries"],
            "final": settings["final"],
            "release": settings["engine"]["release"],
        }
    journal = Journal.load(Paths(given["state_dir"]))
    share = ""
    if journal is not None:
        try:
            share = (journal.folder / SHARE).read_text(encoding="ascii")
        except FileNotFoundError:
            if settings:
                raise HsError(
                    "run {} is open on {} and extracts the whole data set".format(journal.run_id, given["host"]),
                    "everything: that run goes on",
                    "go on with it alone (hs_fleet=false and --limit), or end it with playbooks/restore.yml",
                ) from None
    found = catalogue.take(given["host"], given["output_dir"], now, journal.run_id if journal else "", share)
    return {
        "changed": False,
        "samples": len(found.indices),
        "tokens": found.tokens,
        "identity": found.identity,
        "catalogue": found.pack(),
    }


def main() -> None:
    """Entry point."""
    run(
        {
            "dir": {"type": "path", "required": True},
            "host": {"type": "str", "required": True},
            "output_dir": {"type": "path", "required": True},
            "state_dir": {"type": "path", "required": True},
            "settings": {"type": "dict", "default": {}},
            "keep": {"type": "bool", "default": False},
            "dataset_sha256": {"type": "str", "default": ""},
        },
        work,
    )


if __name__ == "__main__":
    main()

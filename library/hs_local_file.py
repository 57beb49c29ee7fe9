#!/usr/bin/python
"""Documentation of the action hs_local_file, which runs on the controller alone."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_local_file
short_description: Write a text to a file on the controller
description:
  - For what a playbook leaves with whoever started it, a report or a result. In one step, so that a reader never sees half of it.
  - As M(ansible.builtin.copy) delegated to localhost, without a connection, a temporary folder and three processes.
options:
  dest: {description: The file. Its folder is made., type: path, required: true}
  content: {description: A text; a structure, as which Ansible hands over a text of JSON, is written as JSON., type: raw, required: true}
  mode: {description: 'Its mode, in octal.', type: str, default: '0644'}
attributes:
  check_mode: {support: full, description: Says whether it would be another one.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Write the result down
  hs_local_file:
    dest: /home/me/result.json
    content: "{{ hs_result | to_nice_json }}\n"
    mode: "0600"
"""

RETURN = r"""
dest: {description: The file., type: str, returned: success}
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402


def main() -> None:
    """Never on a host: Ansible runs the action of the same name instead."""
    AnsibleModule(argument_spec={}).fail_json(
        msg="hs_local_file is an action; action_plugins of this project is not in use"
    )


if __name__ == "__main__":
    main()

#!/usr/bin/python
"""Documentation of the hs_divide action; the work is in action_plugins/hs_divide.py, on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_divide
short_description: Divide what is left of a data set among hosts, or merge what they have finished
description:
  - What is finished anywhere counts, also on hosts that are not there now and whose catalogue was kept. The rest is divided by tokens.
  - Runs on the controller, in check mode too; it writes only into O(dir).
options:
  dir: {description: Folder on the controller with catalogues and index., type: path, required: true}
  index: {description: File of the index in that folder., type: str, default: ''}
  hosts: {description: 'Hosts whose catalogue was just taken, each with its share.', type: dict, required: true}
  forget:
    description: Hosts whose kept catalogues do not count. With O(merge) they are set aside for good, under another name; a division changes nothing.
    type: list
    elements: str
    default: []
  skip_bad_rows: {description: Go without rows that are no valid samples., type: bool, default: false}
  source: {description: The data set on the controller; hosts then get their rows alone where that is less., type: str, default: ''}
  plan: {description: Only to be looked at; what hosts of a run that is under way are still to read stays., type: bool, default: false}
  merge: {description: Write the catalogue over all hosts instead., type: bool, default: false}
  join: {description: 'With O(merge): a folder on the controller that gets all samples as one data set; empty means none.', type: str, default: ''}
  places: {description: 'With O(join): host to its output folder as the controller sees it.', type: dict, default: {}}
attributes:
  check_mode: {support: full, description: As with O(plan); nothing on any host is changed.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Divide
  hs_divide:
    dir: /home/me/fleet
    index: "{{ hs_indexed.name }}"
    hosts: {one: 1, two: 1}
  run_once: true
"""

RETURN = r"""
parts: {description: 'Host to its part: share (a file), samples, tokens, done, todo, todo_tokens, rows, only.', type: dict, returned: when divided}
refused: {description: Host to the reason why it may not take part., type: dict, returned: when divided}
lines: {description: What was divided or merged., type: list, elements: str, returned: always}
path: {description: The catalogue., type: str, returned: when merged}
complete: {description: Whether every sample is there., type: bool, returned: when merged}
"""

"""What the hs_* modules share: their errors are messages, never tracebacks."""

from __future__ import annotations

from typing import Any, Callable, Dict

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_hs.errors import HsError, told


def run(argument_spec: Dict[str, Any], work: Callable[[AnsibleModule], Dict[str, Any]]) -> None:
    """Build the module, do ``work``, leave with its result; an HsError or a refusal of the system becomes one message."""
    module = AnsibleModule(argument_spec=argument_spec, supports_check_mode=True)
    try:
        result = work(module)
    except HsError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=str(told(error)))
    else:
        module.exit_json(**result)

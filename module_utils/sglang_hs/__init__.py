"""What runs on the target with the standard library alone: the one program that takes production away and brings it back.

The Ansible modules in ``library/`` import it as ``ansible.module_utils.sglang_hs``; a run installs the very same files on the
target, where the dead-man's guard, the boot and the operator's own shell call them as ``python3 -m sglang_hs``.
Hence: relative imports only, nothing from ansible, Python 3.8 and later.
"""

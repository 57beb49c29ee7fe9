#!/usr/bin/python
"""Ansible module: put the restore program, and what runs beside the engine, on the target - whole or not at all."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_install
short_description: Install the restore program and the engine-side packages on the host
description:
  - Makes the state folder and unpacks one archive into its C(lib), by a rename, so that no half-installed program can be called.
  - The archive is made and sent by the action of the same name, from C(module_utils/sglang_hs) and C(files/engine).
  - Writes C(hs), the operator's command, beside it.
options:
  state_dir: {description: Folder of the journal on the host., type: path, required: true}
  archive: {description: 'The archive, packed; set by the action.', type: str}
  checksum: {description: SHA-256 of the archive; set by the action., type: str}
attributes:
  check_mode: {support: full, description: Says whether another version lies there.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Install the restore program
  hs_install:
    state_dir: /var/lib/sglang-hs
"""

RETURN = r"""
checksum: {description: SHA-256 of what is installed., type: str, returned: always}
"""

import base64  # noqa: E402
import io  # noqa: E402
import os  # noqa: E402
import shlex  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402
import tarfile  # noqa: E402
import zlib  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import fsio  # noqa: E402
from ansible.module_utils.sglang_hs.journal import Paths  # noqa: E402

COMMAND = """\
#!/bin/sh
# How things stand, or production back, from the host's own shell: hs status | restore | restore --dry-run
PYTHONPATH={lib} exec {python} -m sglang_hs "$@"
"""


def work(module: AnsibleModule) -> dict:
    """Unpack beside, then rename. The files are for everybody to read: the engine may run as another user."""
    paths = Paths(module.params["state_dir"])
    checksum = module.params["checksum"]
    stamp = paths.lib / ".sha256"
    command = COMMAND.format(lib=shlex.quote(str(paths.lib)), python=shlex.quote(sys.executable))
    program = paths.state / "hs"
    same = stamp.is_file() and stamp.read_text() == checksum and program.is_file() and program.read_text() == command
    if same or module.check_mode:
        return {"changed": not same, "checksum": checksum}
    paths.make()
    fresh, old = paths.state / "lib.new", paths.state / "lib.old"
    for folder in (fresh, old):
        shutil.rmtree(str(folder), ignore_errors=True)
    fresh.mkdir(mode=0o755)
    data = zlib.decompress(base64.b64decode(module.params["archive"]))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive.getmembers():
            if not member.isfile() or member.name.startswith("/") or ".." in member.name.split("/"):
                raise OSError("the archive holds {}, which is no plain file".format(member.name))
            place = fresh / member.name
            place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            source = archive.extractfile(member)
            if source is not None:
                place.write_bytes(source.read())
                place.chmod(0o644)
    for folder in (fresh, *(place for place in fresh.rglob("*") if place.is_dir())):
        folder.chmod(0o755)
    (fresh / ".sha256").write_text(checksum)
    if paths.lib.exists():
        os.rename(str(paths.lib), str(old))
    os.rename(str(fresh), str(paths.lib))
    fsio.sync_folder(paths.state)
    shutil.rmtree(str(old), ignore_errors=True)
    fsio.write_text(program, command, 0o755)
    return {"changed": True, "checksum": checksum}


def main() -> None:
    """Entry point."""
    run(
        {
            "state_dir": {"type": "path", "required": True},
            # no secret, but -vvv would print all of it
            "archive": {"type": "str", "no_log": True},
            "checksum": {"type": "str"},
        },
        work,
    )


if __name__ == "__main__":
    main()

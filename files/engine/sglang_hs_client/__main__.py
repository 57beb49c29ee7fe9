"""``python -m sglang_hs_client run --spec SPEC.json``: 0 complete, 3 work left, 4 canary refused, 5 error budget, 1 anything else.

``python -m sglang_hs_client export --output OUTPUT --format FORMAT --to FOLDER``: 0 done, 1 refused or failed.
``python -m sglang_hs_client verify --output DIR [--checksums] [--remote] [--redo]``: 0 all is right, 6 something is wrong, 1 cannot look.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import List, Optional

import torch
from sglang_hs import formats
from sglang_hs.errors import HsError

from .export import export, told
from .run import Run
from .spec import load
from .verify import verify


def main(arguments: Optional[List[str]] = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="sglang_hs_client", description="Extract hidden states of a data set from a capturing SGLang server."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="extract what is not yet extracted")
    run.add_argument("--spec", type=Path, required=True, help="JSON file, see spec.py")
    made = commands.add_parser("export", help="write a finished extraction in a trainer's format")
    made.add_argument("--output", type=Path, required=True, help="folder that an extraction wrote")
    made.add_argument("--format", choices=list(formats.READS), required=True)
    made.add_argument("--to", type=Path, help="folder of the export (native: none, it goes into --output itself)")
    made.add_argument("--final", choices=[formats.PRE, formats.POST], help="final state, where the format takes either")
    made.add_argument("--dry-run", action="store_true", help="only say how many files are missing")
    made.add_argument("--json", action="store_true", help="end with the result as a line of JSON")
    look = commands.add_parser("verify", help="look whether what was accepted is still what was written")
    look.add_argument("--output", type=Path, required=True, help="the output folder of an extraction")
    look.add_argument("--checksums", action="store_true", help="read every byte, not only sizes and headers")
    look.add_argument("--remote", action="store_true", help="look at moved samples at their remote, too")
    look.add_argument("--redo", action="store_true", help="have what is wrong extracted again by the next run")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the client has threads of its own, and the server needs the cores
    try:
        if options.command == "export":
            result = export(options.output, options.format, options.to, options.final, options.dry_run)
            print(told(result, options.dry_run))
            if options.json:
                print(json.dumps(result))
            return 0
        if options.command == "verify":
            return verify(options.output, options.checksums, options.redo, options.remote)
        return Run(load(options.spec)).execute()
    except HsError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

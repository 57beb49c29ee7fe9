"""``python -m sglang_hs_client run --spec SPEC.json``: 0 complete, 3 work left, 4 canary refused, 5 error budget, 1 anything else.

``python -m sglang_hs_client verify --output DIR [--checksums] [--redo]``: 0 all is right, 6 something is wrong, 1 cannot look.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import List, Optional

import torch
from sglang_hs.errors import HsError

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
    look = commands.add_parser("verify", help="look whether what was accepted is still what was written")
    look.add_argument("--output", type=Path, required=True, help="the output folder of an extraction")
    look.add_argument("--checksums", action="store_true", help="read every byte, not only sizes and headers")
    look.add_argument("--redo", action="store_true", help="have what is wrong extracted again by the next run")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the client has threads of its own, and the server needs the cores
    try:
        if options.command == "verify":
            return verify(options.output, options.checksums, options.redo)
        return Run(load(options.spec)).execute()
    except HsError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

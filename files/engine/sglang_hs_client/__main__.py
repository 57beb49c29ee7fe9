"""``python -m sglang_hs_client run --spec SPEC.json``: 0 complete, 3 work left, 4 canary refused, 5 error budget, 1 anything else."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import List, Optional

import torch
from sglang_hs.errors import HsError

from .run import Run
from .spec import load


def main(arguments: Optional[List[str]] = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="sglang_hs_client", description="Extract hidden states of a data set from a capturing SGLang server."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="extract what is not yet extracted")
    run.add_argument("--spec", type=Path, required=True, help="JSON file, see spec.py")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the client has threads of its own, and the server needs the cores
    try:
        return Run(load(options.spec)).execute()
    except HsError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""What the scenario left on the controller."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def folder() -> Path:
    """Where the controller keeps data set, catalogues and the joined samples."""
    return Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"])


@pytest.fixture(scope="session")
def catalogue(folder: Path) -> list[dict[str, Any]]:
    """The rows of the catalogue."""
    (path,) = folder.glob("fleet/*/catalogue.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]

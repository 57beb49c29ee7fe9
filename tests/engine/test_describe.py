"""The page on layer numbers, and its picture, say what manifest.json says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sglang_hs_client.describe import conventions

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from layers_picture import COLUMNS, numbers  # noqa: E402

KEYS = (
    "boundary",
    "output_of_layer",
    "sglang_layers_to_capture",
    "sglang_set_eagle3_layers_to_capture_until_0_5_12",
    "sglang_set_eagle3_layers_to_capture_from_0_5_13",
    "vllm",
    "huggingface_hidden_states_index",
)


def test_the_picture_has_the_manifest_s_numbers() -> None:
    assert len(KEYS) == len(COLUMNS)
    for boundary in range(62):
        known = conventions(boundary)
        assert numbers(boundary) == tuple(known[key] for key in KEYS)


def test_the_page_has_the_manifest_s_numbers() -> None:
    page = (ROOT / "docs/layers.md").read_text()
    rows = re.findall(r"(?m)^\| [^|]+ \| [^|]+ \| (\d+) \|$", page)
    known = conventions(3)
    order = (KEYS[0], KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
    assert [int(row) for row in rows] == [known[key] for key in order]

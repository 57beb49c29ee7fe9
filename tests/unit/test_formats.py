"""Which final state is captured follows from the formats; what cannot be is refused with the setting's name."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from sglang_hs import formats
from sglang_hs.errors import HsError
from test_roles import REPO


@pytest.mark.parametrize(
    ("names", "wish", "final"),
    [
        (["native"], "auto", "pre_norm"),
        ("native", "auto", "pre_norm"),
        ("native, specforge", "auto", "both"),
        (["native", "modelopt", "speculators-pt"], "auto", "pre_norm"),
        (["specforge"], "auto", "both"),
        (["specforge"], "post_norm", "post_norm"),
        (["modelopt"], "post_norm", "post_norm"),
        (["native", "modelopt"], "both", "both"),
    ],
)
def test_the_formats_decide(names: Any, wish: str, final: str) -> None:
    assert formats.final_for(names, wish) == final


@pytest.mark.parametrize(
    ("names", "wish", "message"),
    [
        (["specforge"], "pre_norm", "hs_final is pre_norm, but specforge"),
        (["native", "specforge"], "post_norm", "hs_final is post_norm, but native"),
        (["eagle"], "auto", "hs_formats holds 'eagle'"),
        ([], "auto", "hs_formats holds nothing"),
        (["native"], "normed", "hs_final holds 'normed'"),
    ],
)
def test_what_cannot_be_is_refused(names: Any, wish: str, message: str) -> None:
    with pytest.raises(HsError, match=message) as caught:
        formats.final_for(names, wish)
    assert caught.value.next and caught.value.left


def test_every_place_knows_the_same_formats() -> None:
    for role in ("preflight", "export_samples"):
        spec = yaml.safe_load((REPO / f"roles/{role}/meta/argument_specs.yml").read_text())
        assert spec["argument_specs"]["main"]["options"]["hs_formats"]["choices"] == list(formats.READS)
    either = yaml.safe_load((REPO / "roles/export_samples/vars/main.yml").read_text())["__export_either"]
    assert either == [name for name, reads in formats.READS.items() if len(reads) > 1]

"""Releases of SGLang other than the local engine's own: real servers of the other layouts, through the capture and the client.

`make compat-real` does this for every layout, rank count and way in; two of the cheapest stand here. The local engine itself is
layout D.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_host import CACHE, REPO, Host, end_host, make_host
from sglang_hs import engine
from sglang_hs.errors import HsError
from test_2_story import count, samples_equal_hugging_face

sys.path.insert(0, str(REPO))

from compat import real, real_case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("releases")


@pytest.mark.parametrize(("release", "layout"), [("0.5.3.post3", "A"), ("0.5.14", "C")])
def test_a_real_server_of_another_layout_gives_hugging_faces_states(folder: Path, release: str, layout: str) -> None:
    outcomes = real.run_all([real_case.Case(release, layout, 1, "edit")], CACHE, folder)
    assert [outcome.trouble for outcome in outcomes] == [""]
    assert outcomes[0].samples == real.SAMPLES
    assert set(outcomes[0].differences) == {
        "boundary 1",
        "boundary 2",
        "boundary 4",
        "final pre-norm",
        "final_post_norm",
    }
    assert max(outcomes[0].differences.values()) < real_case.TOLERANCE


def test_the_way_in_without_an_edit_is_refused_where_the_release_would_pass_over_it(folder: Path) -> None:
    old, new = (
        engine.describe(str(folder / release / "engine/bin/python"), {}, "/") for release in ("0.5.3.post3", "0.5.14")
    )
    with pytest.raises(HsError, match="0.5.3.post3 imports no package"):
        engine.refuse_no_touch(old)
    engine.refuse_no_touch(new)
    host = Host(folder / "0.5.3.post3", 1, release="0.5.3.post3")
    argv = [old["executable"], "-m", "sglang.launch_server", "--model-path", str(CACHE / "engines/model-deepseek")]
    down = {"hs_production_expected": "stopped", "hs_production_argv": argv}  # a server is not needed to look
    played = host.play("extract", extra={"hs_no_touch": True, **down})
    assert played.code != 0
    assert "imports no package" in played.out
    assert played.recap("changed") == 0


def test_a_case_that_gives_other_states_fails(folder: Path) -> None:
    """The judge is no ornament: one number changed in one sample of the case above, and it says so."""
    work = folder / "0.5.14" / "0.5.14-tp1-edit"
    sample = sorted((work / "samples/hidden_states").glob("hs_*.safetensors"))[3]
    raw = bytearray(sample.read_bytes())
    raw[-3] ^= 0x40  # an exponent bit of a float32 in the file's last tensor
    sample.write_bytes(raw)
    outcome = real_case.Outcome(real_case.Case("0.5.14", "C", 1, "edit"))
    argv = json.loads((work / "command.json").read_text())["argv"]
    with pytest.raises(real_case.Failed, match="not Hugging Face's states"):
        real_case.judge(outcome, CACHE, argv, work, folder / "0.5.14/dataset.jsonl")


@pytest.fixture(scope="module")
def old_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    host = make_host(tmp_path_factory.mktemp("old_host"), 1, "0.5.3.post3")
    yield host
    end_host(host)


@pytest.mark.long
def test_the_whole_story_on_a_release_of_a_year_before(old_host: Host) -> None:
    before = old_host.signature()
    refused = old_host.play("extract", extra={"hs_no_touch": True})
    assert refused.code != 0
    assert "imports no package" in refused.out
    assert old_host.signature() == before
    played = old_host.play("extract")
    assert played.code == 0, played.out
    assert "layout A" in played.out
    old_host.assert_back(before)
    assert count(old_host) == 64
    samples_equal_hugging_face(old_host)

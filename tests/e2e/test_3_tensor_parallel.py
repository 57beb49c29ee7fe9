"""Two tensor-parallel ranks: each state still equals Hugging Face's, and production comes back at the same size."""

from __future__ import annotations

import json

import pytest
from local_host import Host
from test_2_story import count, samples_equal_hugging_face


def test_extract_at_tensor_parallel_2(host_tp2: Host) -> None:
    before = host_tp2.signature()
    played = host_tp2.play("extract")
    assert played.code == 0, played.out
    assert "2 ranks" in played.out or "2 rank" in " ".join(played.out.split())
    host_tp2.assert_back(before)
    assert count(host_tp2) == 64
    samples_equal_hugging_face(host_tp2)


@pytest.mark.long  # at one rank in test_2_story, and two ranks' captures of one forward in tests/engine
def test_prompts_that_share_a_forward_at_tensor_parallel_2_in_both_final_states(host_tp2: Host) -> None:
    host_tp2.forget_samples()
    before = host_tp2.signature()
    played = host_tp2.play("extract", extra={"hs_tokens_per_forward": 4096, "hs_formats": ["native", "specforge"]})
    assert played.code == 0, played.out
    host_tp2.assert_back(before)
    assert json.loads((host_tp2.samples / "manifest.json").read_text())["canary"]["together"] > 1
    samples_equal_hugging_face(host_tp2)

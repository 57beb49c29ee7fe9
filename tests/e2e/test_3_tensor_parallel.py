"""Two tensor-parallel ranks: each state still equals Hugging Face's, and production comes back at the same size."""

from __future__ import annotations

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

"""The division of a data set: balanced by tokens, the same for the same hosts, and little moves when a host comes or goes."""

from __future__ import annotations

import random
import statistics
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_hs.division import divide
from sglang_hs.errors import HsError
from sglang_hs.share import Index, Share


def samples(count: int, seed: int = 1) -> list[tuple[int, int]]:
    """Lengths as data sets of conversations have them: many short ones, a few long."""
    chance = random.Random(seed)
    return [(index, max(1, min(int(chance.lognormvariate(7, 0.9)), 16384))) for index in range(count)]


def tokens(part: list[int], of: list[tuple[int, int]]) -> int:
    lengths = dict(of)
    return sum(lengths[index] for index in part)


@pytest.mark.parametrize("hosts", [2, 3, 8, 24])
def test_hosts_get_the_same_number_of_tokens_to_two_percent(hosts: int) -> None:
    given_ = samples(20000)
    parts = divide(given_, {f"host{number}": 1 for number in range(hosts)}, "data")
    loads = [tokens(part, given_) for part in parts.values()]
    mean = statistics.mean(loads)
    assert max(loads) <= 1.02 * mean
    assert min(loads) >= 0.98 * mean


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5000), max_size=200),
    names=st.lists(st.text("abcxyz0123-.", min_size=1, max_size=9), min_size=1, max_size=9, unique=True),
    seed=st.integers(0, 9),
)
def test_each_sample_has_one_host_whatever_the_order_in_which_they_are_named(
    lengths: list[int], names: list[str], seed: int
) -> None:
    given_ = list(enumerate(lengths))
    parts = divide(given_, dict.fromkeys(names, 1), "data")
    assert sorted(index for part in parts.values() for index in part) == list(range(len(lengths)))
    assert set(parts) == set(names)
    chance = random.Random(seed)
    chance.shuffle(given_)
    chance.shuffle(names)
    assert divide(given_, dict.fromkeys(names, 1), "data") == parts
    loads = [tokens(part, given_) for part in parts.values()]
    # what does not fit exactly is off by a sample at most
    assert max(loads, default=0) - min(loads, default=0) <= max(lengths, default=0) + 0.02 * sum(lengths) / len(names)


@pytest.mark.parametrize("hosts", [3, 8])
def test_a_host_more_or_less_moves_its_own_part_and_a_few_percent(hosts: int) -> None:
    given_ = samples(20000)
    names = [f"host{number}" for number in range(hosts)]
    whole = {index: name for name, part in divide(given_, dict.fromkeys(names, 1), "data").items() for index in part}
    fewer = divide(given_, dict.fromkeys(names[:-1], 1), "data")
    moved = sum(whole[index] != name for name, part in fewer.items() for index in part) / len(given_)
    assert 1 / hosts - 0.02 < moved < 1 / hosts + 0.05


def test_a_share_of_two_is_twice_as_much_and_data_sets_are_divided_differently() -> None:
    given_ = samples(8000)
    parts = divide(given_, {"small": 1, "large": 2}, "data")
    assert tokens(parts["large"], given_) / tokens(parts["small"], given_) == pytest.approx(2, rel=0.03)
    assert divide(given_, {"small": 1, "large": 2}, "other") != parts


def test_no_host_and_a_share_that_is_none_are_refused() -> None:
    with pytest.raises(HsError, match="no host"):
        divide([(0, 1)], {}, "data")
    with pytest.raises(HsError, match=r"b has the share 0[\s\S]*hs_share"):
        divide([(0, 1)], {"a": 1, "b": 0}, "data")


def test_index_and_share_come_back_as_they_were() -> None:
    index = Index("ab" * 32, array("I", [5, 0, 7, 9]), None, 100, ["x.jsonl:2: empty"])
    again = Index.unpack(index.pack())
    assert (again, again.bad_total) == (index, 1)
    share = Share.of("a", index, [3, 0], "cd" * 32)
    assert Share.unpack(share.pack()) == share
    assert (list(share.indices), share.tokens, share.rows) == ([0, 3], 14, 4)


def test_a_share_that_is_cut_is_refused() -> None:
    text = Share.of("a", Index("ab", array("I", [5])), [0]).pack()
    with pytest.raises(HsError, match="the host's share cannot be read"):
        Share.unpack(text[:-8])

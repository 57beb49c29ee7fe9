"""Faults planted in a real server: the canary refuses each before a sample is accepted, and says what it saw."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_host import REPO
from proxy import Proxy, lying
from rig import Ended, Rig, install, make_rig, private_engine, write_dataset


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a patched copy of the engine."""
    return private_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def two_ranks(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Tensor parallel 2; the capture's copy can be told to hand out a wrong state."""
    folder = tmp_path_factory.mktemp("two_ranks")
    lib = install(folder / "lib")
    shutil.copy(REPO / "tests/e2e/planted.py", lib / "sglang_hs_capture/planted.py")
    with (lib / "sglang_hs_capture/__init__.py").open("a") as package:
        package.write("\nfrom .planted import attach  # noqa: E402, F811\n")
    with make_rig(folder / "rig", engine, lib, (12, 16, 64), tp=2).serving() as rig:
        yield rig


@pytest.fixture(scope="module")
def careless(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Launched carelessly: the prefix cache is on, and prompts longer than the context are cut without a word."""
    folder = tmp_path_factory.mktemp("careless")
    more = ("--context-length", "64", "--allow-auto-truncate")
    rig = make_rig(
        folder / "rig", engine, install(folder / "lib"), (8, 16, 40), boundaries=(1, 3, 4),
        drop=("--disable-radix-cache",), extra=more,
    )  # fmt: skip
    with rig.serving():
        yield rig


def assert_refused(rig: Rig, ended: Ended, told: str) -> None:
    assert (ended.code, ended.result.get("outcome")) == (4, "canary_refused"), ended
    assert told in ended.message, ended.message
    assert rig.files() == [] and ended.result["counts"]["done"] == 0
    rig.check_no_leftovers()


@pytest.fixture
def plant(two_ranks: Rig) -> Iterator[Path]:
    """The switch of the planted faults; off afterwards."""
    two_ranks.forget()
    switch = two_ranks.lib / "sglang_hs_capture/planted.now"
    yield switch
    switch.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        # rank 0's is what would be written; rank 1's is never seen by who looks at rank 0 alone
        ("partial_sum_0", "boundary 1 on rank 1 differs from rank 0 by"),
        ("partial_sum_1", "boundary 1 on rank 1 differs from rank 0 by"),
        ("wrong_norm", "the final state is asked for pre-norm and is already normed"),
        ("off_by_one", "boundary 2 is not what layer 2 read"),
    ],
)
def test_a_wrong_state_is_refused(two_ranks: Rig, plant: Path, fault: str, told: str) -> None:
    plant.write_text(fault)
    assert_refused(two_ranks, two_ranks.run(), told)


def test_without_a_fault_the_same_server_passes(two_ranks: Rig, plant: Path) -> None:
    assert not plant.exists()
    ended = two_ranks.run()
    assert ended.code == 0 and ended.result["canary"]["ranks"] == 2, ended
    two_ranks.equals_hugging_face()


@pytest.mark.parametrize(
    ("lie", "told"),
    [(False, "tokens came out of the prefix cache"), (True, "a prefix cache hit, or a later chunk of a long prompt")],
)
def test_a_prefix_hit_is_refused(careless: Rig, lie: bool, told: str) -> None:
    """Told by the server; and, where the server keeps it to itself, seen by the capture in the forward."""
    careless.forget()
    write_dataset(careless.dataset, 8, 16, 40)
    with Proxy(careless.url, lying(cached_tokens=0)) as proxy:
        assert_refused(careless, careless.run(server=proxy.url if lie else careless.url), told)


@pytest.mark.parametrize(
    ("lie", "told"), [(False, "tokens: it cut the prompt"), (True, "that are not the prompt: a chunk of it, or the server cut it")]
)  # fmt: skip
def test_a_silent_truncation_is_refused(careless: Rig, lie: bool, told: str) -> None:
    """Also where the server says that it took every token."""
    careless.forget()
    write_dataset(careless.dataset, 8, 100, 200)
    honest = lying(prompt_tokens=lambda asked: len(asked["input_ids"]), cached_tokens=0)
    with Proxy(careless.url, honest) as proxy:
        assert_refused(careless, careless.run(server=proxy.url if lie else careless.url), told)


def test_an_output_folder_of_other_boundaries_is_refused(two_ranks: Rig, careless: Rig, plant: Path) -> None:
    assert two_ranks.run().code == 0
    before = {path.name: path.read_bytes() for path in two_ranks.output.rglob("*.safetensors")}
    ended = careless.run(output_dir=str(two_ranks.output), dataset=str(two_ranks.dataset))
    assert ended.code == 1 and "boundaries: the folder has [1, 2, 4], this run [1, 3, 4]" in ended.message
    assert {path.name: path.read_bytes() for path in two_ranks.output.rglob("*.safetensors")} == before

"""One data set over several hosts: what is finished anywhere counts, what is not is divided, what does not belong together is refused."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import subprocess
import sys
from array import array
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sglang_hs import catalogue, dataset, engine, plan
from sglang_hs import fleet as fleet_module
from sglang_hs.catalogue import Catalogue
from sglang_hs.errors import HsError
from sglang_hs.fleet import Fleet, index_name, key_of, make_index, safe
from sglang_hs.joined import join
from sglang_hs.manifest import Manifest
from sglang_hs.share import Index, Share

SHA = "ab" * 32
LENGTHS = [5 + number % 7 for number in range(120)]
NOW: dict[str, Any] = {
    "dataset_sha256": SHA,
    "cut_to": None,
    "model": "m" * 8,
    "hidden_size": 8,
    "boundaries": [1, 2],
    "final": "pre_norm",
    "release": "0.5.23",
}
INDEX = Index(SHA, array("I", LENGTHS), None, 100)


def size_of(idx: int) -> int:
    return 100 + LENGTHS[idx]


def folder(place: Path, done: Iterable[int], **other: Any) -> Path:
    """An output folder whose book calls ``done`` finished, each with its file and a line in samples.jsonl."""
    (place / "hidden_states").mkdir(parents=True)
    book = Manifest(place)
    book.claim({**{key: NOW[key] for key in NOW if key != "release"}, "dtype": "float32", **other})
    book.set("release", "0.5.23")
    book.add((idx, None, LENGTHS[idx], None) for idx in range(len(LENGTHS)))
    lines = []
    for idx in done:
        name = catalogue.PLACE % idx
        (place / name).write_bytes(bytes(size_of(idx)))
        book.done(idx, name, size_of(idx), f"{idx:064x}")
        lines.append(json.dumps({"idx": idx, "file": name, "seq_len": LENGTHS[idx]}) + "\n")
    book.close()
    (place / "samples.jsonl").write_text("".join(lines))
    (place / "manifest.json").write_text(json.dumps({"counts": {"pending": 0}, "samples": {}, "run_id": "x"}))
    return place


def taken(fleet: Fleet, host: str, place: Path, **now: Any) -> Catalogue:
    found = catalogue.take(host, str(place), {**NOW, **now})
    fleet.keep_now(host, found.pack())
    return found


def share(answer: dict[str, Any], host: str) -> list[int]:
    return list(Share.unpack(Path(answer["parts"][host]["share"]).read_text()).indices)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(str(tmp_path / "fleet"))


def test_a_catalogue_comes_back_as_it_was_and_counts_only_what_is_there(tmp_path: Path) -> None:
    place = folder(tmp_path / "a", range(10))
    (place / (catalogue.PLACE % 3)).unlink()
    (place / (catalogue.PLACE % 4)).write_bytes(b"cut")
    found = catalogue.take("a", str(place), NOW)
    assert list(found.indices) == [0, 1, 2, 5, 6, 7, 8, 9]
    assert (found.identity["dtype"], found.identity["release"]) == ("float32", "0.5.23")
    assert Catalogue.unpack(found.pack()) == found
    assert found.sha256[32:64].hex() == f"{1:064x}"


def test_what_is_finished_counts_and_the_rest_is_divided(fleet: Fleet, tmp_path: Path) -> None:
    for host, done in (("a", range(30)), ("b", range(30, 40)), ("c", range(0))):
        taken(fleet, host, folder(tmp_path / host, done))
    answer = fleet.divide(INDEX, dict.fromkeys("abc", 1.0))
    parts = {host: share(answer, host) for host in "abc"}
    assert sorted(idx for part in parts.values() for idx in part) == list(range(120))
    assert parts["a"][:30] == list(range(30))
    assert not set(parts["b"]) & set(range(30))
    todo = [answer["parts"][host]["todo_tokens"] for host in "abc"]
    assert max(todo) - min(todo) <= max(LENGTHS)
    assert "120 samples" in answer["lines"][0]
    assert "40 samples" in answer["lines"][0]
    assert fleet.divide(INDEX, dict.fromkeys("cab", 1.0))["parts"] == answer["parts"]


def test_a_lost_host_keeps_what_it_had_until_it_is_forgotten(fleet: Fleet, tmp_path: Path) -> None:
    for host, done in (("a", range(30)), ("b", range(30, 40))):
        taken(fleet, host, folder(tmp_path / host, done))
    fleet.divide(INDEX, dict.fromkeys("ab", 1.0))
    answer = fleet.divide(INDEX, {"b": 1.0})
    assert share(answer, "b") == list(range(30, 120))
    assert answer["lost"] == ["a"]
    assert "a" in answer["lines"][-1]
    # a plan forgets nothing: the run after it may want to, or not
    for _ in range(2):
        assert share(fleet.divide(INDEX, {"b": 1.0}, forget=["a"]), "b") == list(range(120))
    assert share(fleet.divide(INDEX, {"b": 1.0}), "b") == list(range(30, 120))
    told = fleet.merge(["b"], forget=["a"])
    assert (told["samples"], set(told["hosts"])) == (10, {"b"})
    # for good, and the same command again does not stumble over it
    assert share(fleet.divide(INDEX, {"b": 1.0}, forget=["a"]), "b") == list(range(120))
    assert share(fleet.divide(INDEX, {"b": 1.0}), "b") == list(range(120))
    with pytest.raises(HsError, match="nothing is kept of nobody"):
        fleet.divide(INDEX, {"b": 1.0}, forget=["nobody"])


def test_what_a_host_had_at_the_end_of_its_run_counts_though_it_is_lost_before_the_next(
    fleet: Fleet, tmp_path: Path
) -> None:
    taken(fleet, "a", tmp_path / "a")
    taken(fleet, "b", tmp_path / "b")
    key = str(fleet.divide(INDEX, dict.fromkeys("ab", 1.0))["key"])
    taken(fleet, "a", folder(tmp_path / "later", range(7)))
    fleet.keep(key, fleet.present("a"))
    assert share(fleet.divide(INDEX, {"b": 1.0}), "b") == list(range(7, 120))


def test_a_plan_leaves_what_a_run_under_way_still_reads(fleet: Fleet, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"input_ids": [number] * 5}) for number in range(40)) + "\n")
    index = make_index(str(data), 100, 50, None)
    for host in "ab":
        taken(fleet, host, tmp_path / host, dataset_sha256=index.sha256)
    run = fleet.divide(index, dict.fromkeys("ab", 1.0), source=str(data))
    files = [run["parts"]["b"][key] for key in ("share", "rows")] + [str(fleet.folder / run["key"] / "index")]
    before = [Path(file).read_bytes() for file in files]
    other = replace(index, max_prompt=7)
    plan = fleet.divide(other, {"b": 1.0}, source=str(data), plan=True)
    assert len(share(plan, "b")) == 40 > len(share(run, "b"))
    assert [Path(file).read_bytes() for file in files] == before


def test_an_open_run_keeps_its_share(fleet: Fleet, tmp_path: Path) -> None:
    for host in "ab":
        taken(fleet, host, folder(tmp_path / host, range(0)))
    before = share(fleet.divide(INDEX, dict.fromkeys("ab", 1.0)), "a")
    mine = Share.of("a", INDEX, before)
    fleet.keep_now("a", catalogue.take("a", str(tmp_path / "a"), NOW, "run", mine.pack()).pack())
    taken(fleet, "c", tmp_path / "c")
    answer = fleet.divide(INDEX, dict.fromkeys("abc", 1.0))
    assert share(answer, "a") == before
    assert sorted(share(answer, "b") + share(answer, "c")) == sorted(set(range(120)) - set(before))
    fleet.keep_now("c", catalogue.take("c", str(tmp_path / "c"), NOW, "run", Share.of("c", INDEX, [1]).pack()).pack())
    answer = fleet.divide(INDEX, {"a": 1.0, "c": 1.0})
    assert answer["left_over"] > 0
    assert "nobody's" in answer["lines"][-1]


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("release", "0.5.10", "engine release: a has 0.5.23, b has 0.5.10"),
        ("model", "other", "model fingerprint: a has mmmmmmmm, b has other"),
        ("boundaries", [1, 3], r"boundaries: a has \[1, 2\], b has \[1, 3\]"),
        ("dataset_sha256", "cd" * 32, "data set's sha256"),
    ],
)
def test_hosts_that_differ_are_refused_and_both_are_named(
    fleet: Fleet, tmp_path: Path, key: str, value: Any, told: str
) -> None:
    taken(fleet, "a", tmp_path / "a")
    taken(fleet, "b", tmp_path / "b", **{key: value})
    answer = fleet.divide(INDEX, dict.fromkeys("ab", 1.0))
    assert set(answer["parts"]) == {"a"}
    (reason,) = answer["refused"].values()
    assert re.search(told, reason)
    assert "Left as it was: everything: production was not touched" in reason
    assert share(answer, "a") == list(range(120))


def test_whoever_holds_samples_says_what_the_data_set_is(fleet: Fleet, tmp_path: Path) -> None:
    taken(fleet, "a", tmp_path / "a", model="new")
    taken(fleet, "b", folder(tmp_path / "b", range(5)))
    answer = fleet.divide(INDEX, dict.fromkeys("ab", 1.0))
    assert (set(answer["parts"]), set(answer["refused"])) == ({"b"}, {"a"})


def test_a_lost_host_that_differs_is_named_with_the_way_to_go_without_it(fleet: Fleet, tmp_path: Path) -> None:
    taken(fleet, "b", folder(tmp_path / "b", range(5)))
    fleet.divide(INDEX, {"b": 1.0})
    taken(fleet, "a", folder(tmp_path / "a", range(6, 9), model="new"), model="new")
    with pytest.raises(HsError, match=r"b and a may not fill one data set[\s\S]*hs_fleet_forget=b"):
        fleet.divide(INDEX, {"a": 1.0})
    answer = fleet.divide(INDEX, {"a": 1.0}, forget=["b"])
    assert len(share(answer, "a")) == 120


def test_a_folder_of_another_release_is_refused_by_its_own_host(tmp_path: Path) -> None:
    place = folder(tmp_path / "a", range(3))
    with pytest.raises(HsError, match=r"engine release: the folder has 0.5.23, a run now 0.5.24"):
        catalogue.take("a", str(place), {**NOW, "release": "0.5.24"})


@pytest.mark.parametrize(
    ("files", "release"),
    [
        ({"version.py": '__version__ = "0.5.4"\n'}, "0.5.4"),
        (
            {
                "version.py": "from sglang._version import __version__\n",
                "_version.py": "__version__: str\n__version__ = version = '0.5.23'\n",
            },
            "0.5.23",
        ),
        ({"version.py": 'import importlib.metadata\n\n__version__ = importlib.metadata.version("sglang")\n'}, "0.5.1"),
    ],
)
def test_the_release_that_hosts_are_compared_by_is_what_the_engine_says_of_itself(
    tmp_path: Path, files: dict[str, str], release: str
) -> None:
    package = tmp_path / "sglang"
    (package / "srt/models").mkdir(parents=True)
    (package / "srt/models/deepseek_v2.py").touch()
    (package / "__init__.py").write_text("from sglang.version import __version__\n")
    for name, text in files.items():
        (package / name).write_text(text)
    # a checkout that was pulled after it was installed
    (tmp_path / "sglang-0.5.1.dist-info").mkdir()
    (tmp_path / "sglang-0.5.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.1\n")
    env = {"PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", "import sglang; print(sglang.__version__)"]
    said = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.strip()
    assert engine.describe(sys.executable, env, "/")["release"] == said == release


def test_an_index_is_named_by_the_bytes_that_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"input_ids": [1, 2]}\n')
    settings = {"cut_to": None, "max_prompt": "50", "model": {"vocab_size": 100}}
    found = fleet_module.indexed(str(data), settings, [])
    assert Index.unpack(found["index"]).sha256 == found["sha256"]
    assert fleet_module.indexed(str(data), settings, [found["name"]]) == {
        "sha256": found["sha256"],
        "name": found["name"],
    }
    then = dataset.digest(data)
    data.write_text('{"input_ids": [1, 2, 3]}\n')
    hashes = [then, dataset.digest(data)]
    monkeypatch.setattr(
        fleet_module.dataset, "digest", lambda path: hashes.pop(0)
    )  # the first before it was written anew
    late = fleet_module.indexed(str(data), settings, [])
    assert Index.unpack(late["index"]).sha256 == late["sha256"] != then
    assert late["sha256"][:24] in late["name"]


def test_bad_rows_are_nobodys_and_refused_unless_meant(fleet: Fleet, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"input_ids": [1] * n}) + "\n" for n in (3, 0, 5)))
    index = make_index(str(data), 100, 50, 4)
    assert list(index.lengths) == [3, 0, 4]
    taken(fleet, "a", tmp_path / "a", dataset_sha256=index.sha256)
    with pytest.raises(HsError, match=r"1 of 3 rows[\s\S]*hs_skip_bad_rows"):
        fleet.divide(index, {"a": 1.0})
    assert share(fleet.divide(index, {"a": 1.0}, skip_bad_rows=True), "a") == [0, 2]


def test_hosts_are_sent_their_rows_alone_where_that_is_less(fleet: Fleet, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"input_ids": [number] * 5}) for number in range(40)) + "\n\n")
    index = make_index(str(data), 100, 50, None)
    for host in "ab":
        taken(fleet, host, tmp_path / host, dataset_sha256=index.sha256)
    answer = fleet.divide(index, dict.fromkeys("ab", 1.0), source=str(data))
    for host, part in answer["parts"].items():
        lines = Path(part["rows"]).read_text().splitlines()
        assert [json.loads(line)["input_ids"][0] for line in lines] == share(answer, host)
        assert Share.unpack(Path(part["share"]).read_text()).only == part["only"] != ""
    assert fleet.divide(index, {"a": 1.0}, source=str(data))["parts"]["a"]["rows"] == ""
    data.write_text(data.read_text().replace("3", "4"))  # after it was hashed and read
    with pytest.raises(HsError, match="changed while it was read"):
        fleet.divide(index, dict.fromkeys("ab", 1.0), source=str(data))


def test_a_sample_done_twice_is_kept_once_and_by_the_first_host(fleet: Fleet, tmp_path: Path) -> None:
    for host, done in (("b", range(60)), ("a", range(50, 120))):
        taken(fleet, host, folder(tmp_path / host, done), dataset_sha256=SHA)
    fleet.divide(INDEX, dict.fromkeys("ab", 1.0))
    told = fleet.merge("ab")
    rows = [json.loads(line) for line in Path(told["path"]).read_text().splitlines()]
    assert [row["idx"] for row in rows] == list(range(120))
    assert {row["host"] for row in rows[50:60]} == {"a"}
    assert rows[7] == {
        "idx": 7,
        "host": "b",
        "file": "hidden_states/hs_7.safetensors",
        "seq_len": LENGTHS[7],
        "bytes": size_of(7),
        "sha256": f"{7:064x}",
    }
    assert (told["complete"], told["twice"], told["hosts"]["b"]["samples"]) == (True, 10, 50)
    line = join(Path(told["path"]), {host: str(tmp_path / host) for host in "ab"}, tmp_path / "all")
    assert "120 samples joined" in line
    lines = [json.loads(line) for line in (tmp_path / "all/samples.jsonl").read_text().splitlines()]
    assert [line["idx"] for line in lines] == list(range(120))
    assert (tmp_path / "all" / lines[55]["file"]).resolve() == tmp_path / "a/hidden_states/hs_55.safetensors"
    document = json.loads((tmp_path / "all/manifest.json").read_text())
    assert (document["counts"]["done"], document["complete"], "run_id" in document) == (120, True, False)
    # what is missing is said, and nothing that looks whole is left
    (tmp_path / "b" / (catalogue.PLACE % 3)).unlink()
    with pytest.raises(HsError, match=r"hs_3\.safetensors"):
        join(Path(told["path"]), {host: str(tmp_path / host) for host in "ab"}, tmp_path / "all")
    assert not (tmp_path / "all/manifest.json").exists()


def test_a_folder_that_no_join_made_is_never_written_into(fleet: Fleet, tmp_path: Path) -> None:
    place = folder(tmp_path / "mnt/a", range(120))
    taken(fleet, "a", place)
    fleet.divide(INDEX, {"a": 1.0})
    told, places = Path(fleet.merge("a")["path"]), {"a": str(place)}
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    (tmp_path / "link").symlink_to(place)
    for to in (place, tmp_path / "mnt", place / "all", tmp_path / "link"):
        with pytest.raises(HsError, match=r"is the output folder of a .*[\s\S]*hs_fleet_joined"):
            join(told, places, to)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/one").write_text("mine")
    with pytest.raises(HsError, match="holds what no join has made"):
        join(told, places, tmp_path / "photos")
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    # what an earlier join and an export of it left is replaced
    to = tmp_path / "all"
    join(told, places, to)
    (to / "state.json").write_text("{}")
    (to / "data-00000-of-00001.arrow").write_bytes(b"x")
    (to / "hidden_states/hs_500.safetensors").symlink_to(place / (catalogue.PLACE % 3))
    join(told, places, to)
    assert sorted(path.name for path in to.iterdir()) == [
        ".joined",
        "hidden_states",
        "manifest.json",
        "manifest.sqlite",
        "samples.jsonl",
    ]
    assert len(list((to / "hidden_states").iterdir())) == 120


def test_a_data_set_is_complete_by_the_limits_it_was_divided_with_last(fleet: Fleet, tmp_path: Path) -> None:
    longest = max(LENGTHS)
    short = replace(INDEX, lengths=array("I", (0 if length == longest else length for length in LENGTHS)))
    valid = [idx for idx, length in enumerate(LENGTHS) if length < longest]
    place = folder(tmp_path / "a", valid)
    taken(fleet, "a", place)
    # as hs_index keeps them: both, by name
    for index, most in ((short, longest - 1), (INDEX, longest)):
        path = fleet.folder / index_name(SHA, None, most, 100)
        path.write_text(index.pack())
    fleet.divide(short, {"a": 1.0}, skip_bad_rows=True)
    assert fleet.merge("a")["complete"] is True
    fleet.divide(INDEX, {"a": 1.0})
    told = fleet.merge("a")
    assert (told["complete"], told["lines"][1].split()[0]) == (False, str(120 - len(valid)))
    # a sample of a row that is none by now makes up for no other
    book = Manifest(place)
    other = LENGTHS.index(longest)
    (place / (catalogue.PLACE % other)).write_bytes(bytes(size_of(other)))
    book.done(other, catalogue.PLACE % other, size_of(other), "0" * 64)
    book.close()
    (place / (catalogue.PLACE % valid[0])).unlink()
    taken(fleet, "a", place)
    fleet.divide(short, {"a": 1.0}, skip_bad_rows=True)
    told = fleet.merge("a")
    assert (told["samples"], told["complete"]) == (len(valid), False)


def test_a_catalogue_of_another_data_set_is_not_kept_with_this_ones(fleet: Fleet, tmp_path: Path) -> None:
    for host in "ab":
        taken(fleet, host, folder(tmp_path / host, range(5)))
    fleet.divide(INDEX, dict.fromkeys("ab", 1.0))
    taken(fleet, "b", folder(tmp_path / "later", range(9), dataset_sha256="cd" * 32), dataset_sha256="cd" * 32)
    with pytest.raises(HsError, match="data set's sha256"):
        fleet.merge("ab")
    assert share(fleet.divide(INDEX, {"a": 1.0}), "a") == [*range(5), *range(5, 120)]


def test_a_sample_that_is_not_as_long_as_its_row_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    place = folder(tmp_path / "a", range(5))
    found = taken(fleet, "a", place)
    fleet.keep_now("a", replace(found, lengths=array("I", [5, 6, 7, 8, 8])).pack())
    with pytest.raises(HsError, match="sample 4 has 8 tokens on a, row 4 of the data set has 9"):
        fleet.divide(INDEX, {"a": 1.0})
    fleet.keep_now("a", replace(found, indices=array("I", [0, 1, 2, 3, 120])).pack())
    with pytest.raises(HsError, match="beyond the end"):
        fleet.divide(INDEX, {"a": 1.0})


def test_what_the_first_does_not_know_two_others_must_agree_in(tmp_path: Path) -> None:
    first = replace(catalogue.take("a", str(folder(tmp_path / "a", range(2))), NOW), identity={**NOW, "release": None})
    others = [replace(first, host=host, identity={**NOW, "release": host}) for host in ("0.5.10", "0.5.23")]
    (reason,) = catalogue.refusals([first, *others]).values()
    assert "0.5.23 and 0.5.10 may not fill one data set: engine release: 0.5.10 has 0.5.10, 0.5.23 has 0.5.23" in reason


def test_a_book_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    place = folder(tmp_path / "a", range(40))
    with contextlib.closing(sqlite3.connect(place / "manifest.sqlite")) as book:
        (page,) = book.execute("SELECT rootpage FROM sqlite_master WHERE name = 'samples'").fetchone()
        (size,) = book.execute("PRAGMA page_size").fetchone()
    with (place / "manifest.sqlite").open("r+b") as handle:
        handle.seek((page - 1) * size)
        handle.write(b"\xff" * size)
    with pytest.raises(HsError, match=r"manifest\.sqlite of a cannot be read"):
        catalogue.take("a", str(place), NOW)


def test_one_sample_in_two_sizes_is_an_error_that_names_both(fleet: Fleet, tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a", range(3)), folder(tmp_path / "b", range(3))
    (b / (catalogue.PLACE % 1)).write_bytes(bytes(7))
    book = Manifest(b)
    book.done(1, catalogue.PLACE % 1, 7, "0" * 64)
    book.close()
    both = [taken(fleet, "a", a), taken(fleet, "b", b)]
    with pytest.raises(HsError, match=r"sample 1 is .* on a, and .* in 7 bytes on b"):
        catalogue.merge(both)


def test_a_plan_of_a_share_reads_no_data_set(tmp_path: Path) -> None:
    settings = {
        "dataset": str(tmp_path / "not there yet.jsonl"),
        "model": {"vocab_size": 100, "hidden_size": 8, "itemsize": 4},
        "max_prompt": 100,
        "cut_to": None,
        "boundaries": [1, 2],
        "final": "pre_norm",
        "output_dir": str(folder(tmp_path / "a", range(10))),
        "dump_dir": str(tmp_path),
        "state_dir": str(tmp_path / "state"),
        "window_s": 3600,
        "window": "1h",
        "tokens_per_forward": 0,
        "in_flight": 4,
    }
    found = plan.look(settings, False, 0, Share.of("a", INDEX, range(40)).pack())
    assert (found["samples"], found["done"], found["work"], found["tokens"]) == (40, 10, True, sum(LENGTHS[:40]))
    found = plan.look(settings, False, 0, replace(Share.of("a", INDEX, range(10)), owned=10).pack())
    assert found["work"] is False
    # not described: its own samples want to be, those that others have too do not
    (tmp_path / "a/samples.jsonl").unlink()
    assert plan.look(settings, False, 0, replace(Share.of("a", INDEX, range(10)), owned=1).pack())["work"] is True
    assert plan.look(settings, False, 0, Share.of("a", INDEX, range(10)).pack())["work"] is False
    nothing = plan.look({**settings, "output_dir": str(tmp_path / "b")}, False, 0, Share.of("b", INDEX, ()).pack())
    assert (nothing["work"], nothing["samples"]) == (False, 0)
    with pytest.raises(HsError, match="its server takes 6"):
        plan.look({**settings, "max_prompt": 6}, False, 0, Share.of("a", INDEX, range(40)).pack())


def test_names_of_hosts_as_files_are_never_the_same() -> None:
    assert len({safe("a/b"), safe("a_b"), safe("a:b")}) == 3
    assert safe("node-1.example") == "node-1.example"
    assert key_of(NOW) != key_of({**NOW, "boundaries": [2, 3]})

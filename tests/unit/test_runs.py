"""Past runs are listed as they are; one goes only when it is named in full, complete, closed and ours, and nothing else goes with it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from sglang_hs import fsio, runs
from sglang_hs.errors import HsError
from sglang_hs.journal import Journal, Paths
from sglang_hs.manifest import Manifest

RECORD = {"argv": ["x"], "expected": "running"}


def tree(folder: Path) -> dict[str, Any]:
    """Everything beneath: links by what they say, files by their bytes."""
    found: dict[str, Any] = {}
    for place, folders, names in os.walk(folder):
        for name in folders + names:
            path = Path(place) / name
            key = str(path.relative_to(folder))
            found[key] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
    return found


class Place:
    """A state folder and output folders, written by the project's own code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = Paths(str(folder / "state"))
        self.paths.make()

    def run(self, output: Path, outcome: str = "complete", close: bool = True, dataset: str = "/data") -> str:
        settings = {"window_s": 3600, "output_dir": str(output), "dataset": dataset}
        journal = Journal.open(self.paths, "me@laptop", {"settings": settings, "flags": {}}, {}, RECORD)
        (journal.folder / "server.log").write_text("x" * 5000)
        if outcome:
            fsio.write_json(journal.folder / "result.json", {"outcome": outcome})
        if close:
            journal.close("restored", "the run is over")
        return journal.run_id

    def output(self, name: str, samples: int = 4, pending: int = 0) -> Path:
        folder = self.folder / name
        for part in ("hidden_states", "quarantine", "runs"):
            (folder / part).mkdir(parents=True)
        book = Manifest(folder)
        book.claim({"dataset_sha256": "d", "boundaries": [1], "final": "pre_norm"})
        for idx in range(samples + pending):
            book.add([(idx, str(idx), 10, None)])
            if idx < samples:
                file = f"hidden_states/hs_{idx}.safetensors"
                (folder / file).write_bytes(b"s" * 1000)
                book.done(idx, file, 1000, "0" * 64)
        book.close()
        for file in (".lock", "quarantine/hs_9.json", "runs/20260101-000000-abcd.json", "hidden_states/.hs_3.part"):
            (folder / file).write_text("{}")
        if not pending:
            for file in (
                "manifest.json",
                "samples.jsonl",
                "data-00000-of-00001.arrow",
                "dataset_info.json",
                "state.json",
            ):
                (folder / file).write_text("{}")
        return folder

    def known(self, *more: str) -> dict[str, Any]:
        return runs.known(str(self.paths.state), more)

    def remove(self, name: str, **given: Any) -> dict[str, Any]:
        return runs.remove(str(self.paths.state), name, **given)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def refused(place: Place, name: str, why: str, **given: Any) -> None:
    before = tree(place.folder)
    with pytest.raises(HsError, match=why):
        place.remove(name, **given)
    after = tree(place.folder)
    after.pop("state/.mutex", None)
    before.pop("state/.mutex", None)
    assert after == before


def test_the_list_tells_sizes_outcomes_and_what_is_open(place: Place) -> None:
    output = place.output("out")
    first = place.run(output)
    cut = place.run(place.output("half", samples=1, pending=3), outcome="window")
    still = place.run(place.folder / "none", outcome="", close=False)
    found = place.known(str(place.folder / "elsewhere"))
    told = {run["run_id"]: run["outcome"] for run in found["runs"]}
    assert told == {first: "complete", cut: "window", still: "open"}
    assert found["open"] == still
    size = sum(path.stat().st_size for path in (place.paths.runs / first).iterdir())
    assert next(run for run in found["runs"] if run["run_id"] == first)["bytes"] == size > 5000
    outputs = {Path(entry["path"]).name: entry for entry in found["outputs"]}
    assert set(outputs) == {"out", "half"}  # what is not there is not listed
    assert (outputs["out"]["complete"], outputs["out"]["samples"], outputs["out"]["runs"]) == (True, 4, [first])
    assert outputs["out"]["bytes"] == sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    assert (outputs["half"]["complete"], outputs["half"]["samples"], outputs["half"]["total"]) == (False, 1, 4)
    text = "\n".join(runs.lines(found))
    assert f"run {cut}: window, begun {time.strftime('%Y')}" in text and "1 of 4 samples, not complete" in text


def test_a_named_run_goes_and_nothing_else(place: Place) -> None:
    output = place.output("out")
    first, second = place.run(output), place.run(output)
    before = tree(place.folder)
    looked = place.remove(first, dry=True)
    assert tree(place.folder) == {**before, "state/.mutex": b""}
    done = place.remove(first)
    assert (done["files"], done["bytes"]) == (looked["files"], looked["bytes"]) and done["bytes"] > 5000
    gone = set(before) - set(tree(place.folder))
    assert gone == {key for key in before if key.startswith(f"state/runs/{first}")}
    assert [run["run_id"] for run in place.known()["runs"]] == [second]
    refused(place, first, "not among the runs")


def test_a_named_output_goes_whole_and_frees_what_it_says(place: Place) -> None:
    output, other = place.output("out"), place.output("other")
    os.link(output / "hidden_states/hs_0.safetensors", output / "hidden_states/hs_7.safetensors")
    run_id = place.run(output)
    place.run(other)
    kept = tree(other)
    listed = next(entry for entry in place.known()["outputs"] if entry["path"] == str(output))
    looked = place.remove(str(output), dry=True)
    done = place.remove(str(output))
    assert done["bytes"] == looked["bytes"] == listed["bytes"] and not output.exists()
    assert tree(other) == kept and (place.paths.runs / run_id / "journal.json").is_file()
    assert str(output) not in {entry["path"] for entry in place.known()["outputs"]}


def test_a_strangers_files_stay_and_links_are_not_followed(place: Place) -> None:
    output = place.output("out")
    place.run(output)
    outside = place.folder / "outside"
    outside.mkdir()
    (outside / "hs_1.safetensors").write_text("somebody else's")
    (output / "notes.txt").write_text("mine")
    (output / "hidden_states/hs_0.safetensors").unlink()
    (output / "hidden_states/hs_0.safetensors").symlink_to(outside / "hs_1.safetensors")
    (output / "exports").symlink_to(outside)
    (output / "more").mkdir()
    (output / "more/hs_5.safetensors").write_text("mine too")
    done = place.remove(str(output))
    assert done["left"] == ["exports", "more/hs_5.safetensors", "notes.txt"] and done["strangers"] == 3
    assert tree(output) == {
        "exports": str(outside),
        "more": "folder",
        "more/hs_5.safetensors": b"mine too",
        "notes.txt": b"mine",
    }
    assert (outside / "hs_1.safetensors").read_text() == "somebody else's"
    assert "3 files that are none of ours stay" in runs.removed_lines(done, False)[1]


def test_what_is_not_complete_takes_a_second_word(place: Place) -> None:
    half = place.output("half", samples=1, pending=3)
    cut = place.run(half, outcome="window")
    for name in (str(half), cut):
        refused(place, name, "is not complete.*\n.*\n.*hs_clean_incomplete=true")
        assert place.remove(name, incomplete=True)["files"] > 0
    assert not half.exists() and not (place.paths.runs / cut).exists()


def test_the_open_run_its_output_and_its_data_set_stay(place: Place) -> None:
    output, source = place.output("out"), place.output("source")
    place.run(source)
    run_id = place.run(output, close=False, dataset=str(source))
    refused(place, run_id, "is open", incomplete=True)
    refused(place, str(output), "the open run .* works with", incomplete=True)
    refused(place, str(source), "the open run .* works with", incomplete=True)


@pytest.mark.parametrize("spoiled", ["missing", "empty", "text", "link", "unbound"])
def test_a_folder_without_a_book_of_ours_stays(place: Place, spoiled: str) -> None:
    output = place.output("out")
    place.run(output)
    book = output / "manifest.sqlite"
    if spoiled == "link":
        book.rename(place.folder / "book")
        book.symlink_to(place.folder / "book")
    else:
        book.unlink()
    if spoiled in ("empty", "text"):
        book.write_text("" if spoiled == "empty" else "no database at all, but as long as one would begin")
    if spoiled == "unbound":
        Manifest(output).close()
    refused(place, str(output), "no book of an extraction", incomplete=True)


def test_names_that_are_not_exactly_a_listed_one(place: Place) -> None:
    output = place.output("out")
    run_id = place.run(output)
    for name in ("/", "//", "/etc", str(output) + "/", f"{output}/../out", str(output.parent), "out", run_id[:-1], "*", "..", ".",
                 f"../{place.paths.runs.name}/{run_id}", str(place.paths.runs / run_id), str(place.paths.state)):  # fmt: skip
        refused(place, name, "not among the runs", incomplete=True)


def test_a_link_to_an_output_or_to_a_runs_folder_stays(place: Place) -> None:
    output = place.output("out")
    (place.folder / "link").symlink_to(output)
    place.run(place.folder / "link")
    refused(place, str(place.folder / "link"), "is a link", incomplete=True)
    other = place.run(output)
    (place.paths.runs / other).rename(place.folder / "moved")
    (place.paths.runs / other).symlink_to(place.folder / "moved")
    refused(place, other, "not among the runs", incomplete=True)


def test_the_state_folders_own_place_and_a_working_client_are_refused(place: Place) -> None:
    # an output folder around the state folder
    book = Manifest(place.folder)
    book.claim({"a": 1})
    book.close()
    place.run(place.folder)
    refused(place, str(place.folder), "the state folder are not apart", incomplete=True)
    output = place.output("out")
    place.run(output)
    with (output / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(place, str(output), "somebody works in")


def test_mount_points_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "/" in runs.mount_points() and "/proc" in runs.mount_points()
    table = place.folder / "table"
    table.write_text("36 35 98:0 / /mnt/a\\040b rw - ext3 /dev/x rw\n")
    assert runs.mount_points(table) == ["/mnt/a b"]
    output = place.output("out")
    run_id = place.run(output)
    for point in (output, output / "hidden_states", place.paths.runs / run_id / "x"):
        monkeypatch.setattr(runs, "mount_points", lambda point=point: [str(point)])
        name = run_id if "state" in str(point.relative_to(place.folder).parts[0]) else str(output)
        refused(place, name, "a file system is mounted on")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_real_mount_within_an_output_stays(place: Place) -> None:
    output = place.output("out")
    place.run(output)
    (output / "runs2").mkdir()
    words = ["unshare", "--mount", "sh", "-c", 'mount --bind "$1" "$2" && exec "$3" -c "$4" "$5" "$6"', "sh"]
    code = (
        "import sys; sys.path.insert(0, %r)\nfrom sglang_hs import runs\nruns.remove(sys.argv[1], sys.argv[2])"
        % str(Path(__file__).resolve().parents[2] / "module_utils")
    )
    given = [
        str(output / "quarantine"),
        str(output / "runs2"),
        "/usr/bin/env",
        "python3",
        str(place.paths.state),
        str(output),
    ]
    words[4] = words[4].replace('exec "$3" -c "$4" "$5" "$6"', 'exec python3 -c "$3" "$4" "$5"')
    done = subprocess.run(
        [*words, given[0], given[1], code, given[4], given[5]], capture_output=True, text=True, timeout=60
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount here: {done.stderr.strip()}")
    assert "a file system is mounted on" in done.stderr
    assert (output / "manifest.sqlite").exists() and (output / "quarantine/hs_9.json").exists()


def test_a_removal_that_was_broken_off_anywhere_is_done_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    first = place.output("out0")
    place.run(first)
    files = place.remove(str(first), dry=True)["files"]
    unlink, left = os.unlink, 0

    def some(path: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(5, "the disk is gone")
        unlink(path)

    for at in range(files):
        output = place.output(f"out{at + 1}")
        place.run(output)
        left = at
        with monkeypatch.context() as patch:
            patch.setattr(runs.os, "unlink", some)
            with pytest.raises(OSError, match="the disk is gone"):
                place.remove(str(output))
        # still known as what it was
        assert (output / "manifest.sqlite").is_file()
        assert place.remove(str(output), incomplete=True)["files"] == files - at
        assert not output.exists()


def test_a_host_that_never_saw_a_run(tmp_path: Path) -> None:
    assert runs.lines(runs.known(str(tmp_path / "state"))) == ["no run has ever been begun on this host"]
    with pytest.raises(HsError, match="no run has ever been begun"):
        runs.remove(str(tmp_path / "state"), "x")
    assert json.dumps(runs.known(str(tmp_path / "state")))


def test_what_is_still_to_be_moved_takes_a_second_word_and_a_remote_is_told(place: Place) -> None:
    output = place.output("out")
    place.run(output)
    book = Manifest(output)
    book.set("move", {"to": "far:a"})
    book.moved("far:a", [0, 1, 2])
    book.close()
    (found,) = runs.known(str(place.paths.state))["outputs"]
    assert found["moved"] == {"far:a": 3} and not found["complete"]
    assert any("3 of them are at far:a" in line for line in runs.lines(runs.known(str(place.paths.state))))
    with pytest.raises(HsError, match="is not complete"):
        runs.remove(str(place.paths.state), str(output))
    book = Manifest(output)
    book.moved("far:a", [3])
    book.close()
    (output / "archives").mkdir()
    (output / "archives/hidden_states-000001.safetensors").write_bytes(b"x")
    (output / "archives.json").write_text("{}")
    assert runs.remove(str(place.paths.state), str(output))["strangers"] == 0
    assert not output.exists()

"""Arrow data set and exports of a whole run against the breakable engine: what is written, what is refused, what is gone on with."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import pyarrow
import pytest
import torch
from fake_engine import HIDDEN
from sglang_hs import dataset
from sglang_hs import export as caller
from sglang_hs.dataset import Limits, Row
from sglang_hs.errors import HsError
from sglang_hs.manifest import Manifest
from sglang_hs_client import __main__ as program
from sglang_hs_client import arrowset, export, layouts
from sglang_hs_client.captured import Source
from test_client_run import ROWS, Setup

MASKS = [[place % 2 for place in range(len(ids))] for ids in ROWS]
FORMATS = ("speculators-pt", "specforge", "modelopt")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """A finished extraction with both final states. Tests only read it."""
    made = Setup(tmp_path_factory.mktemp("captured"), final="both")
    code, result = made.run()
    assert code == 0, result
    yield made
    made.engine.close()


def reference(captured: Setup, idx: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(boundaries [T, 2, H], pre-norm [T, H], post-norm [T, H]) of row idx, computed anew by the engine's own model."""
    boundaries, pre, post = captured.engine.models[0].reference(ROWS[idx])
    return torch.stack([boundaries[1], boundaries[3]], dim=1), pre, post


def load(path: Path) -> Any:
    return torch.load(str(path), weights_only=True)


# -- the arrow data set ----------------------------------------------------------------------------------------------------


def arrow_rows(folder: Path) -> List[Dict[str, Any]]:
    with pyarrow.ipc.open_stream(str(folder / arrowset.DATA)) as stream:
        rows: List[Dict[str, Any]] = stream.read_all().to_pylist()
    return rows


def test_the_arrow_rows_are_the_data_sets_rows(captured: Setup) -> None:
    assert arrow_rows(captured.output) == [
        {"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)} for ids, mask in zip(ROWS, MASKS)
    ]
    told = json.loads((captured.output / "manifest.json").read_text())
    assert told["arrow"]["rows"] == len(ROWS)
    assert arrowset.whole(captured.output, len(ROWS))
    assert not list(captured.output.glob(".*.part"))


def test_our_own_output_is_a_data_set(captured: Setup) -> None:
    found = list(dataset.rows(captured.output, Limits(1000, 100)))
    assert found == [Row(idx, ids, mask) for idx, (ids, mask) in enumerate(zip(ROWS, MASKS))]


def test_rows_in_quarantine_keep_their_place(tmp_path: Path) -> None:
    made = Setup(tmp_path)
    rows: List[Any] = [{"input_ids": ids} for ids in ROWS]
    rows[5] = {"text": "no ids"}
    rows[-1] = {"input_ids": []}
    made.write_rows(rows)
    try:
        assert made.run(error_budget=2)[0] == 0
    finally:
        made.engine.close()
    found = arrow_rows(made.output)
    assert len(found) == len(ROWS)
    placeholder = {"input_ids": [0], "loss_mask": [0], "seq_len": 1}
    assert found[5] == found[-1] == placeholder
    assert found[6]["input_ids"] == ROWS[6] and found[6]["loss_mask"] == [1] * len(ROWS[6])
    to = tmp_path / "pt"
    result = export.export(made.output, "speculators-pt", to, None)
    assert (result["written"], result["left_out"]) == (len(ROWS) - 2, 2)
    assert not (to / "data_5.pt").exists()
    assert "2 rows of the data set are in quarantine" in export.told(result, False)


def test_without_pyarrow_the_run_completes_and_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Setup(tmp_path)
    try:
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "pyarrow", None)
            code, result = made.run()
        assert code == 0
        assert "install pyarrow there, then: python -m sglang_hs_client export" in result["message"]
        assert not (made.output / arrowset.STATE).exists()
        with monkeypatch.context() as patched, pytest.raises(HsError, match="pyarrow cannot be imported"):
            patched.setitem(sys.modules, "pyarrow", None)
            export.export(made.output, "native", None, None)
        assert export.export(made.output, "native", None, None)["written"] == 1
        assert arrow_rows(made.output)[3]["input_ids"] == ROWS[3]
        again = export.export(made.output, "native", None, None)
        assert (again["written"], again["verified"]) == (0, 1)
        with (made.output / arrowset.DATA).open("r+b") as handle:
            handle.seek(-9, os.SEEK_END)
            handle.write(b"\x01")
        assert export.export(made.output, "native", None, None)["written"] == 1
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "pyarrow", None)
            assert made.run()[0] == 0
        # rows of an earlier run are never left beside newer states
        assert not (made.output / arrowset.STATE).exists()
    finally:
        made.engine.close()


def test_the_arrow_writer_holds_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrowset, "BATCH", 4096)

    def peak(rows: int) -> int:
        folder = tmp_path / str(rows)
        folder.mkdir()
        before = pyarrow.total_allocated_bytes()
        arrow, most = arrowset.ArrowSet(folder), 0
        for idx in range(rows):
            arrow.add(idx, list(range(100)), [1] * 100)
            most = max(most, len(arrow._ids), pyarrow.total_allocated_bytes() - before)
        assert arrow.finish(rows) == rows
        arrow.close()
        with pyarrow.ipc.open_stream(str(folder / arrowset.DATA)) as stream:
            assert max(batch.num_rows for batch in stream) <= 41
        return most

    assert peak(4000) <= peak(200)


# -- the exports -----------------------------------------------------------------------------------------------------------


def test_speculators_pt(captured: Setup, tmp_path: Path) -> None:
    for final in ("pre_norm", "post_norm"):
        to = tmp_path / final
        assert export.export(captured.output, "speculators-pt", to, final)["written"] == len(ROWS)
        for idx, ids in enumerate(ROWS):
            found = load(to / "data_{}.pt".format(idx))
            states, pre, post = reference(captured, idx)
            assert found["input_ids"].tolist() == ids and found["loss_mask"].tolist() == MASKS[idx]
            assert found["input_ids"].dtype == found["loss_mask"].dtype == torch.int64
            assert len(found["hidden_states"]) == 3
            torch.testing.assert_close(torch.stack(found["hidden_states"][:2], dim=1), states)
            torch.testing.assert_close(found["hidden_states"][-1], pre if final == "pre_norm" else post)
        lengths = json.loads((to / "sample_lengths.json").read_text())
        assert lengths == {str(idx): len(ids) for idx, ids in enumerate(ROWS)}
        config = json.loads((to / "data_config.json").read_text())
        assert (
            config["data"]["num_samples"] == len(ROWS)
            and config["format"]["schema"]["hidden_states"]["num_tensors"] == 3
        )
        assert config["hidden_states"]["layer_ids"][:2] == [0, 2]


def test_specforge(captured: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "GROUP", 10)
    assert export.export(captured.output, "specforge", tmp_path / "to", None)["final"] == "post_norm"
    for idx, ids in enumerate(ROWS):
        folder = "rows_{}-{}".format(idx // 10 * 10, idx // 10 * 10 + 10)
        found = load(tmp_path / "to" / folder / "data_{}.ckpt".format(idx))
        states, _, post = reference(captured, idx)
        assert found["input_ids"].tolist() == ids and found["loss_mask"].tolist() == MASKS[idx]
        torch.testing.assert_close(found["hidden_state"], post.unsqueeze(0))
        torch.testing.assert_close(found["aux_hidden_state"], states.reshape(1, len(ids), 2 * HIDDEN))


def test_modelopt(captured: Setup, tmp_path: Path) -> None:
    for final, wish in (("post_norm", None), ("pre_norm", "pre_norm")):
        to = tmp_path / final
        export.export(captured.output, "modelopt", to, wish)
        for idx, ids in enumerate(ROWS):
            found = load(to / "row_{}.pt".format(idx))
            states, pre, post = reference(captured, idx)
            assert (found["conversation_id"], found["hidden_states_prenorm"]) == (
                "row_{}".format(idx),
                final == "pre_norm",
            )
            assert found["input_ids"].tolist() == ids and found["loss_mask"].tolist() == MASKS[idx]
            torch.testing.assert_close(found["hidden_states"], pre if final == "pre_norm" else post)
            torch.testing.assert_close(found["aux_hidden_states"], states.reshape(len(ids), 2 * HIDDEN))


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_holds_its_own_tensors_and_no_more(captured: Setup, tmp_path: Path, name: str) -> None:
    export.export(captured.output, name, tmp_path / "to", None)
    job = export.Export(Source(captured.output), layouts.LAYOUTS[name], tmp_path / "to", "post_norm")
    for idx, ids in enumerate(ROWS):
        path = tmp_path / "to" / job.layout.path(idx)
        values = load(path)
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor)] + list(
            values["hidden_states"] if name == "speculators-pt" else []
        )
        assert all(tensor.is_contiguous() for tensor in tensors)
        assert all(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() for tensor in tensors)
        assert len(ids) * job.sample_bytes <= path.stat().st_size <= len(ids) * job.sample_bytes + export.OVERHEAD
    job.source.close()


def test_a_sample_of_one_token_shares_no_storage() -> None:
    """A slice of one row is contiguous as it is: contiguous() would hand back the view."""
    buffer = torch.arange(4.0 * 8).reshape(1, 4, 8)
    sample = layouts.Captured(
        0, torch.tensor([3]), torch.tensor([1]), buffer[:, :-1], {"pre_norm": buffer[:, -1], "post_norm": buffer[:, -1]}
    )
    for layout in layouts.LAYOUTS.values():
        for value in layout.build(sample, "post_norm").values():
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, torch.Tensor):
                    assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_again_it_verifies_mends_what_is_damaged_and_makes_what_is_missing(captured: Setup, tmp_path: Path) -> None:
    to = tmp_path / "to"
    export.export(captured.output, "modelopt", to, None)
    stamps = {path.name: path.stat().st_mtime_ns for path in to.glob("*.pt")}
    again = export.export(captured.output, "modelopt", to, None)
    assert (again["written"], again["verified"], again["described"]) == (0, len(ROWS), 0)
    assert {path.name: path.stat().st_mtime_ns for path in to.glob("*.pt")} == stamps
    (to / "row_4.pt").unlink()
    with (to / "row_7.pt").open("r+b") as handle:
        handle.seek(600)
        handle.write(b"\xff\xff")
    (to / "row_9.pt").write_bytes(b"short")
    (to / ".row_4.pt.part").write_bytes(b"of a killed export")
    dry = export.export(captured.output, "modelopt", to, None, dry=True)
    assert dry["written"] == 2  # by name and size
    mended = export.export(captured.output, "modelopt", to, None)
    assert (mended["written"], mended["mended"], mended["verified"]) == (3, 1, len(ROWS) - 3)
    assert not list(to.glob(".*.part"))
    torch.testing.assert_close(load(to / "row_7.pt")["hidden_states"], reference(captured, 7)[2])


def test_killed_half_way_it_goes_on(captured: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to, save, count = tmp_path / "to", torch.save, [0]

    def failing(what: Any, handle: Any) -> None:
        count[0] += 1
        if count[0] == 6:
            handle.write(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(what, handle)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", failing)
        with pytest.raises(HsError, match="takes no more: .*No space left"):
            export.export(captured.output, "specforge", to, None)
    assert len(list(to.glob("rows_*/*.ckpt"))) == 5 and not list(to.glob("rows_*/.*"))
    assert export.export(captured.output, "specforge", to, None)["written"] == len(ROWS) - 5


REFUSED = [
    ("specforge", "pre_norm", None, "specforge needs the post_norm final state, and .* hs_final=pre_norm"),
    ("speculators-pt", "pre_norm", "post_norm", "speculators-pt needs the post_norm"),
    ("native", "post_norm", None, "native needs the pre_norm"),
    ("specforge", "both", "pre_norm", "specforge reads the post_norm final state, not the pre_norm"),
]


@pytest.mark.parametrize(("name", "final", "wish", "message"), REFUSED)
def test_the_wrong_final_state_is_refused(
    captured: Setup, name: str, final: str, wish: Optional[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(captured.output)
    source.final = final
    try:
        with pytest.raises(HsError, match=message) as caught:
            export.choose_final(source, name, wish)
        assert caught.value.next
    finally:
        source.close()


def test_bad_input_is_one_message(captured: Setup, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(message: str, *words: str) -> None:
        assert program.main(["export", "--output", *words]) == 1
        told = capsys.readouterr().err
        assert message in told and "Next: " in told and "Traceback" not in told

    refused("has no manifest.sqlite", str(tmp_path), "--format", "modelopt", "--to", str(tmp_path / "to"))
    refused("modelopt needs a folder to be written to", str(captured.output), "--format", "modelopt")
    refused("is the captured folder itself", str(captured.output), "--format", "modelopt", "--to", str(captured.output))
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.txt").write_text("years of work\n")
    refused(
        "holds files that are not ours: thesis.txt", str(captured.output), "--format", "modelopt", "--to", str(strange)
    )
    to = str(tmp_path / "to")
    assert program.main(["export", "--output", str(captured.output), "--format", "modelopt", "--to", to]) == 0
    capsys.readouterr()
    refused("belongs to another export (format", str(captured.output), "--format", "specforge", "--to", to)


def test_an_unfinished_or_torn_output_is_refused(tmp_path: Path) -> None:
    made = Setup(tmp_path)
    try:
        assert made.run()[0] == 0
    finally:
        made.engine.close()
    to = tmp_path / "to"
    path = made.output / "hidden_states" / "hs_3.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4] + bytes(4))  # of the same size, one value less
    with pytest.raises(HsError, match="hs_3.safetensors is not what was captured: its sha256"):
        export.export(made.output, "modelopt", to, None)
    assert not (to / "row_3.pt").exists() and (to / "row_2.pt").exists()
    path.write_bytes(whole)

    lines = (made.output / "samples.jsonl").read_text().splitlines()
    (made.output / "samples.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(HsError, match="is the last, but manifest.sqlite has"):
        export.export(made.output, "modelopt", to, None)
    (made.output / "samples.jsonl").unlink()
    with pytest.raises(HsError, match="lacks samples.jsonl"):
        export.export(made.output, "modelopt", to, None)
    book = Manifest(made.output)
    book.again(3)
    book.close()
    with pytest.raises(HsError, match="is not complete: 1 of 24 samples"):
        export.export(made.output, "modelopt", to, None)


def test_too_little_room_is_told_before_anything_is_written(
    captured: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs
    small = type("Small", (), {"f_bfree": 1, "f_bavail": 1, "f_frsize": 4096})
    monkeypatch.setattr(export.os, "statvfs", lambda place: small)
    with pytest.raises(HsError, match=r"the export needs .* in .*, which has 0.0 MB"):
        export.export(captured.output, "modelopt", tmp_path / "to", None)
    assert not list((tmp_path / "to").glob("*.pt"))
    monkeypatch.setattr(export.os, "statvfs", real)


def test_two_exports_at_once_are_refused(captured: Setup, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    held = export.lock(tmp_path / "to" / ".lock", "a test")
    try:
        with pytest.raises(HsError, match="another client is at work on the export folder"):
            export.export(captured.output, "modelopt", tmp_path / "to", None)
    finally:
        os.close(held)


def test_one_sample_in_memory_at_a_time(captured: Setup, tmp_path: Path) -> None:
    """Thirty samples of 8 MB each: the process grows by a few samples, not by thirty."""
    code = """
import resource, sys, torch
from pathlib import Path
from sglang_hs_client import export, layouts
from sglang_hs_client.captured import Captured
from types import SimpleNamespace as Some

rows = [Some(idx=idx, length=1024, name="n", sha256=str(idx)) for idx in range(int(sys.argv[2]))]
def read(sample, record):
    data = torch.ones(1024, 4, 512)
    return Captured(sample.idx, torch.zeros(1024, dtype=torch.int64), torch.zeros(1024, dtype=torch.int64), data[:, :-1], {"pre_norm": data[:, -1]})
source = Some(identity={}, folder=Path("/nowhere"), boundaries=3, hidden_size=512, itemsize=4, dtype="float32", left_out=0, read=read,
    book=Some(samples=lambda state: iter(rows)), counts={"done": len(rows)}, rows=lambda: ((row, {}) for row in rows),
    document={"slots": [], "written": "", "model": {"path": ""}, "dataset": {"path": ""}, "num_layers": 5})
export.Export(source, layouts.LAYOUTS["speculators-pt"], Path(sys.argv[1]), "pre_norm").run()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""

    def peak(count: int) -> int:
        words = [sys.executable, "-c", code, str(tmp_path / str(count)), str(count)]
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
        return int(subprocess.run(words, env=env, check=True, stdout=subprocess.PIPE).stdout.split()[-1])

    assert peak(30) - peak(3) < 3 * 8 * 2**20


def test_called_as_the_module_calls_it(captured: Setup, tmp_path: Path) -> None:
    """module_utils/sglang_hs/export.py in a fresh process of this Python, with what hs_install puts on a host."""
    repository = Path(__file__).resolve().parents[2]
    state = tmp_path / "state"
    (state / "lib").mkdir(parents=True)
    os.symlink(str(repository / "module_utils/sglang_hs"), str(state / "lib/sglang_hs"))
    words: Tuple[str, ...] = (str(state), str(captured.output), "specforge", str(tmp_path / "to"), "", sys.executable)
    assert caller.call(*words)["line"].startswith("would install")
    os.symlink(str(repository / "files/engine/sglang_hs_client"), str(state / "lib/sglang_hs_client"))
    result = caller.call(*words, dry=True)
    assert result["written"] == len(ROWS) and not (tmp_path / "to").exists()
    result = caller.call(*words)
    assert result["written"] == len(ROWS)
    assert result["line"].startswith("specforge: 24 samples in")
    with pytest.raises(HsError, match="the export to specforge failed with status 1: .*specforge reads"):
        caller.call(*words[:4], "pre_norm", sys.executable)
    (state / "journal.json").write_text("{}")
    with pytest.raises(HsError, match="a run is open"):
        caller.call(*words)
    (state / "journal.json").unlink()
    with pytest.raises(HsError, match="does not tell the engine's Python"):
        caller.call(*words[:4])

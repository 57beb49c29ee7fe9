"""The whole client against the breakable engine: exact results, planted faults refused, failures that lose nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Tuple

import pytest
import torch
from fake_engine import HIDDEN, VOCAB, Engine
from safetensors import safe_open
from sglang_hs.dataset import digest, sequence_name
from sglang_hs.fleet import make_index
from sglang_hs.manifest import Manifest
from sglang_hs.share import Share
from sglang_hs_capture import forwards, hooks, recorder, writer
from sglang_hs_client import dumpfile, exchange, extract, output
from sglang_hs_client.faults import SampleFault
from sglang_hs_client.gate import Gate
from sglang_hs_client.run import Run
from sglang_hs_client.spec import parse

ROWS = [[(7 * row + 3 * place) % VOCAB for place in range(5 + row % 9)] for row in range(24)]
ROWS[11] = list(ROWS[2])
ROWS[17] = list(ROWS[2])


class Setup:
    """An engine, a data set and a specification in ``folder``."""

    def __init__(self, folder: Path, **engine: Any) -> None:
        self.folder = folder
        self.engine = Engine(folder, **engine)
        self.output = folder / "out"
        self.dataset = folder / "data.jsonl"
        self.write_rows([{"input_ids": ids, "loss_mask": [place % 2 for place in range(len(ids))]} for ids in ROWS])
        self.document: Dict[str, Any] = {
            "server": self.engine.url,
            "dataset": str(self.dataset),
            "output_dir": str(self.output),
            "dump_dir": str(self.engine.dump),
            "boundaries": [1, 3],
            "final": engine.get("final", "pre_norm"),
            "in_flight": 3,
            "retries": 1,
            "request_timeout_s": 5,
            "dump_wait_s": 2,
            "outage_s": 1,
            "canary": {"sequences": 3, "positions": 64},
            "model_path": str(self.engine.checkpoint),
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "max_prompt": 100,
            "run_dir": str(folder / "run"),
            "run_id": "test",
            "provenance": {"who": "a test"},
        }

    def write_rows(self, rows: List[Any]) -> None:
        self.dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, **changes: Any) -> Tuple[int, Dict[str, Any]]:
        code = Run(parse(dict(self.document, **changes))).execute()
        return code, json.loads((self.folder / "run" / "result.json").read_text())

    def check(self, rows: List[List[int]] = ROWS) -> None:
        """Every sample is there once, whole, and right."""
        assert sorted(os.listdir(str(self.output / "hidden_states"))) == sorted(
            "hs_{}.safetensors".format(idx) for idx in range(len(rows))
        )
        for idx, ids in enumerate(rows):
            path = self.output / "hidden_states" / "hs_{}.safetensors".format(idx)
            with safe_open(str(path), framework="pt") as handle:
                hidden = handle.get_tensor("hidden_states")
                assert handle.get_tensor("token_ids").tolist() == ids
            boundaries, pre, _ = self.engine.models[0].reference(ids)
            for slot, state in enumerate((boundaries[1], boundaries[3], pre)):
                torch.testing.assert_close(hidden[:, slot], state)
        book = Manifest(self.output, read_only=True)
        assert book.counts()["done"] == len(rows)
        for sample in book.samples():
            assert sample.file is not None and dumpfile.file_sha256(self.output / sample.file) == sample.sha256
        book.close()
        for name in ("want", "done", "used", "failed"):
            assert os.listdir(str(self.engine.dump / name)) == []


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    made = Setup(tmp_path)
    yield made
    made.engine.close()


def test_the_data_set_comes_out_exact_and_described(setup: Setup) -> None:
    code, result = setup.run()
    assert (code, result["outcome"]) == (0, "complete"), result
    setup.check()
    assert result["counts"]["forwards"] == len(ROWS) - 2 and result["counts"]["shared"] == 2
    assert result["canary"]["positions"] >= 64
    told = json.loads((setup.output / "manifest.json").read_text())
    assert told["complete"] is True and told["provenance"] == {"who": "a test"}
    assert [slot.get("output_of_layer") for slot in told["slots"]] == [0, 2, None]
    assert list(told["model"]["sha256"]["config"]) == ["config.json"]
    assert told["hidden_states_prenorm"] is True and told["size"]["bytes"] == result["counts"]["bytes_done"]
    lines = [json.loads(line) for line in (setup.output / "samples.jsonl").read_text().splitlines()]
    assert [line["input_ids"] for line in lines] == ROWS
    assert lines[0] == {
        "idx": 0, "file": "hidden_states/hs_0.safetensors", "seq_len": 5, "input_ids": ROWS[0], "loss_mask": [0, 1, 0, 1, 0],
    }  # fmt: skip
    progress = json.loads((setup.folder / "run" / "progress.json").read_text())
    assert (progress["phase"], progress["done"], progress["tokens_done"]) == ("done", len(ROWS), sum(map(len, ROWS)))
    before = len(setup.engine.requests)
    assert result["tokens_this_run"] == sum(map(len, ROWS))
    code, again = setup.run()  # nothing left to do: not one request
    assert (code, again["tokens_this_run"]) == (0, 0)
    assert len(setup.engine.requests) == before


@pytest.mark.parametrize("layout", ["B", "D"])
def test_prompts_that_share_a_forward_are_cut_apart_exactly(tmp_path: Path, layout: str) -> None:
    made = Setup(tmp_path, layout=layout, ranks=2)
    made.engine.pack = True
    try:
        code, result = made.run(in_flight=16, tokens_in_flight=200)
        assert code == 0, result
        made.check()
        assert result["canary"]["together"] > 1
        assert result["counts"]["forwards"] < len(ROWS) - 2  # how many share one is the moment's doing
    finally:
        made.engine.close()


def test_a_wrong_cut_is_refused_before_the_data_set(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    right = forwards.plan

    def wrong(batch: Any, wish: Any) -> Any:
        rows, wanted, refused_wishes = right(batch, wish)
        moved = [replace(each, start=each.start - 1, stop=each.stop - 1) if each.start else each for each in wanted]
        return rows, moved, refused_wishes

    monkeypatch.setattr(forwards, "plan", wrong)
    setup.engine.pack = True
    refused(setup, "prompts share the forward", in_flight=16, tokens_in_flight=200)


def test_the_gate_counts_prompts_and_tokens() -> None:
    gate = Gate(3, 10)
    inside: List[int] = []
    release = threading.Event()

    def pass_through(tokens: int) -> None:
        with gate.through(tokens):
            inside.append(tokens)
            release.wait(10)

    def enter(tokens: int, goes: bool = True) -> threading.Thread:
        thread = threading.Thread(target=pass_through, args=(tokens,))
        before, until = len(inside), time.monotonic() + 10
        thread.start()
        while goes and len(inside) == before and time.monotonic() < until:
            time.sleep(0.001)
        if not goes:
            time.sleep(0.05)  # the chance to go in wrongly
        return thread

    threads = [enter(30), enter(1, goes=False)]
    assert inside == [30]  # larger than all the room: it goes, alone
    release.set()
    for thread in threads:
        thread.join()
    release.clear()
    inside.clear()
    threads = [enter(4), enter(5), enter(2, goes=False), enter(1), enter(1, goes=False)]
    assert inside == [4, 5, 1]  # 2 tokens too many; then a prompt too many
    release.set()
    for thread in threads:
        thread.join()
    assert sorted(inside) == [1, 1, 2, 4, 5]


def test_cut_to_cuts(setup: Setup) -> None:
    assert setup.run(cut_to=4)[0] == 0
    setup.check([ids[:4] for ids in ROWS])


@pytest.mark.parametrize("final", ["post_norm", "both"])
def test_the_other_final_states_pass_the_canary(tmp_path: Path, final: str) -> None:
    made = Setup(tmp_path, final=final, layout="B", ranks=2)
    try:
        code, result = made.run()
        assert code == 0, result
        assert result["canary"]["ranks"] == 2
    finally:
        made.engine.close()


# -- planted faults: each must stop the run before the data set ---------------------------------------------------------


def refused(made: Setup, told: str, **changes: Any) -> None:
    code, result = made.run(**changes)
    assert (code, result["outcome"]) == (4, "canary_refused"), result
    assert told in result["message"], result["message"]
    assert os.listdir(str(made.output / "hidden_states")) == []
    assert result["counts"]["done"] == 0


def test_planted_partial_sum_on_one_rank(tmp_path: Path) -> None:
    made = Setup(tmp_path, layout="B", ranks=2)
    made.engine.recorders[1].boundary = _share(made.engine.recorders[1].boundary)  # type: ignore[method-assign]
    try:
        refused(made, "boundary 3 on rank 1 differs from rank 0")
    finally:
        made.engine.close()


def _share(original: Any) -> Any:
    """As under fusion: a rank's own share of boundary 3 is captured, the model itself goes on with the whole sum."""
    share = torch.linspace(0.2, 1.0, HIDDEN)
    return lambda index, state: original(index, state * share if index == 3 else state)


def test_planted_partial_sum_on_every_rank(tmp_path: Path) -> None:
    made = Setup(tmp_path, layout="B", ranks=2)
    for entry in made.engine.recorders:
        entry.boundary = _share(entry.boundary)  # type: ignore[method-assign]
    try:
        refused(made, "boundary 3 is not what layer 3 read")
    finally:
        made.engine.close()


@pytest.mark.parametrize(("claimed", "told"), [("pre_norm", "already normed"), ("post_norm", "is not normed")])
def test_planted_wrong_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: str, told: str) -> None:
    original = recorder.Recorder.final

    def swapped(self: Any, args: Any, out: Any) -> None:
        original(self, (out[1],), (out[1], out[0]))

    monkeypatch.setattr(recorder.Recorder, "final", swapped)
    made = Setup(tmp_path, final=claimed)
    try:
        refused(made, told)
    finally:
        made.engine.close()


def test_planted_boundary_off_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = hooks._collect
    monkeypatch.setattr(hooks, "_collect", lambda entry, boundary: _elsewhere(original, entry, boundary))
    made = Setup(tmp_path, layout="D")
    try:
        refused(made, "boundary 1 is not what layer 1 read")
    finally:
        made.engine.close()


def _elsewhere(original: Any, entry: Any, boundary: int) -> Any:
    """The hook of ``boundary``, which now gets the state after its layer instead of before it."""
    inner = original(entry, boundary)

    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = inner(module, args, kwargs)
        collector = kwargs[hooks.CAPTURE]
        with torch.no_grad():
            stream = args[2].stream.clone()
            stream.add_(args[1])
            after = stream + module.self_attn.forward(module.input_layernorm(stream), args[2].extend_seq_lens_cpu)
        collector.capture = lambda state, owned=False: entry.boundary(boundary, after)
        return args, kwargs

    return hook


@pytest.mark.parametrize("lie", [False, True])
def test_planted_prefix_hit(setup: Setup, lie: bool) -> None:
    setup.engine.cache, setup.engine.lie = True, lie
    refused(setup, "prefix cache")


@pytest.mark.parametrize("lie", [False, True])
def test_planted_silent_truncation(setup: Setup, lie: bool) -> None:
    setup.engine.cut, setup.engine.lie = 12, lie
    refused(setup, "cut" if not lie else "not the prompt", canary={"sequences": 2, "positions": 8})


def test_planted_other_checkpoint(setup: Setup) -> None:
    setup.engine.head += torch.randn_like(setup.engine.head)
    refused(setup, "differs from the server's own log-probabilities")


# -- failures that lose nothing -----------------------------------------------------------------------------------------


def test_a_server_that_answers_500_now_and_then(setup: Setup) -> None:
    setup.engine.fault = lambda number, ids, answer: (
        (500, {"error": "no"}) if number > 12 and number % 3 == 0 else (200, answer)
    )
    code, result = setup.run(retries=4)
    assert code == 0, result
    setup.check()


def test_one_bad_sample_goes_to_quarantine_within_the_budget_and_is_tried_again(setup: Setup) -> None:
    bad = ROWS[5]
    setup.engine.fault = lambda number, ids, answer: (400, {"error": "forbidden"}) if ids == bad else (200, answer)
    skip = {"canary": {"sequences": 2, "positions": 8}}
    code, result = setup.run(error_budget=1, **skip)
    assert (code, result["outcome"], result["counts"]["failed"]) == (0, "complete", 1), result
    told = json.loads((setup.output / "quarantine" / "hs_5.json").read_text())
    assert "400" in told["reason"] and told["tokens"] == len(bad)
    setup.engine.fault = lambda number, ids, answer: (200, answer)
    assert setup.run(**skip)[0] == 0
    setup.check()
    assert os.listdir(str(setup.output / "quarantine")) == []


def test_the_error_budget_stops_the_run_with_the_list(setup: Setup) -> None:
    setup.engine.fault = lambda number, ids, answer: (400, {"error": "forbidden"}) if number > 12 else (200, answer)
    code, result = setup.run(error_budget=2)
    assert (code, result["outcome"]) == (5, "error_budget")
    assert "forbidden" in result["message"] and "row " in result["message"]


def test_bad_rows_stop_the_run_before_the_server_is_asked(setup: Setup) -> None:
    setup.write_rows([{"input_ids": ROWS[0]}, {"input_ids": [VOCAB]}])
    code, result = setup.run()
    assert (code, result["outcome"]) == (5, "error_budget")
    assert "outside the vocabulary" in result["message"] and setup.engine.requests == []


def test_dumps_that_are_wrong_are_refused_and_kept_for_a_look(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated, flipped to NaN, zeroed, one bit off: each once, each told, each had right at the second attempt."""
    target = {sequence_name(ROWS[7]): "cut", sequence_name(ROWS[8]): "nan", sequence_name(ROWS[9]): "zero"}
    target[sequence_name(ROWS[10])] = "bit"
    original = output.Output.accept

    def spoil(self: Any, dump: Path, idx: int, ids: List[int], name: str, expected: Any) -> Any:
        kind = target.pop(name, None)
        if kind:
            data = bytearray(dump.read_bytes())
            start = dumpfile.read_header(dump).start + 8 * len(ids)
            if kind == "cut":
                del data[-5:]
            elif kind == "nan":
                data[start : start + 4] = b"\xff\xff\xff\xff"
            elif kind == "bit":
                data[start] ^= 1
            else:
                data[start:] = bytes(len(data) - start)
            dump.write_bytes(bytes(data))
        return original(self, dump, idx, ids, name, expected)

    monkeypatch.setattr(output.Output, "accept", spoil)
    code, result = setup.run()
    assert code == 0, result
    assert target == {}
    setup.check()
    book = Manifest(setup.output, read_only=True)
    assert [sample.idx for sample in book.samples() if sample.attempts == 2] == [7, 8, 9, 10]
    book.close()
    target[sequence_name(ROWS[7])] = "nan"
    (setup.output / "hidden_states" / "hs_7.safetensors").unlink()
    code, result = setup.run(retries=0)
    assert code == 5 and "not finite" in result["message"]
    assert (setup.output / "quarantine" / "hs_7.safetensors").exists()


def test_what_was_checked_is_what_is_kept_also_when_a_late_forward_writes_the_dump_again(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one file system the dump is moved, not copied. Another file of that name, put there during the check, must not slip in."""
    original, late = output.check_data, []

    def slowly(path: Path, header: Any, ids: List[int]) -> str:
        told = original(path, header, ids)
        dump = setup.engine.dump / "done" / (sequence_name(ids) + ".safetensors")
        dump.write_bytes(b"a second dump, never looked at")
        late.append(dump)
        return told

    monkeypatch.setattr(output, "check_data", slowly)
    code, result = setup.run()
    assert code == 0 and late, result
    setup.check()


@pytest.fixture
def apart(setup: Setup) -> Iterator[Setup]:
    """The output on another file system than the dumps, as on every real host: samples are copied, not renamed."""
    mine = os.stat(str(setup.engine.dump)).st_dev
    places = [
        place
        for place in ("/dev/shm", "/var/tmp", "/run")
        if os.access(place, os.W_OK) and os.stat(place).st_dev != mine
    ]
    assert places, "no second file system that this user may write"
    with tempfile.TemporaryDirectory(dir=places[0]) as folder:
        setup.output = Path(folder) / "out"
        setup.document["output_dir"] = str(setup.output)
        yield setup


def test_samples_are_copied_to_another_file_system_exactly(apart: Setup) -> None:
    code, result = apart.run()
    assert code == 0, result
    apart.check()
    assert (apart.output / "hidden_states" / "hs_0.safetensors").stat().st_mode & 0o777 == 0o644 & ~_umask()


def test_a_copy_with_a_changed_bit_is_refused_by_name_and_made_again(
    apart: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, broken = output._copy, set()

    def failing(path: Path, to: Path) -> None:
        original(path, to)
        if path.name not in broken:
            broken.add(path.name)
            with to.open("r+b") as handle:
                handle.seek(-1, os.SEEK_END)
                last = handle.read(1)[0]
                handle.seek(-1, os.SEEK_END)
                handle.write(bytes([last ^ 1]))

    monkeypatch.setattr(output, "_copy", failing)
    code, result = apart.run()
    assert code == 0, result
    assert len(broken) == len(ROWS) - 2
    apart.check()
    broken.clear()
    for path in (apart.output / "hidden_states").iterdir():
        path.unlink()
    code, result = apart.run(retries=0)
    assert code == 5 and "differs from the dump" in result["message"] and "failing disk" in result["message"], result


def _umask() -> int:
    old = os.umask(0o022)
    os.umask(old)
    return old


def test_resume_verifies_and_redoes_only_what_is_wrong(setup: Setup) -> None:
    assert setup.run()[0] == 0
    folder = setup.output / "hidden_states"
    (folder / "hs_1.safetensors").unlink()
    with (folder / "hs_4.safetensors").open("r+b") as handle:
        handle.truncate(100)
    (folder / "hs_6.safetensors").write_bytes((folder / "hs_7.safetensors").read_bytes())
    assert len(ROWS[0]) == len(ROWS[9])
    (folder / "hs_0.safetensors").write_bytes((folder / "hs_9.safetensors").read_bytes())  # of the same size
    before = len(setup.engine.requests)
    code, result = setup.run(canary={"skip": True})
    assert code == 0 and len(setup.engine.requests) - before == 4, result
    setup.check()


def test_a_file_placed_by_a_killed_client_is_adopted(setup: Setup) -> None:
    assert setup.run()[0] == 0
    book = Manifest(setup.output)
    book.again(3)
    book.close()
    before = len(setup.engine.requests)
    code, result = setup.run(canary={"skip": True})
    assert code == 0 and len(setup.engine.requests) == before
    setup.check()


def test_another_file_system_copies(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def stat(path: Any, **more: Any) -> Any:
        found = real(path, **more)
        if str(path).startswith(str(setup.engine.dump / "done")):
            values = list(found)
            values[2] += 1
            return os.stat_result(values)
        return found

    monkeypatch.setattr(output.os, "stat", stat)
    assert setup.run()[0] == 0
    setup.check()


def test_dumps_are_written_over_those_that_were_taken(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the output lies on another file system: a handful of files holds all dumps, one after the other, and no sample is another's."""
    real, files = writer.write_summed, set()

    def write(path: Path, *given: Any) -> None:
        real(path, *given)
        files.add(path.stat().st_ino)

    monkeypatch.setattr(writer, "write_summed", write)
    test_another_file_system_copies(setup, monkeypatch)
    assert len(files) <= len(ROWS) / 2, len(files)
    assert os.listdir(str(setup.engine.dump / "used")) == []


def test_a_full_dump_folder_takes_its_room_from_used_files(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    used, real = setup.engine.dump / "used", writer.write_summed
    left = []

    def full(path: Path, *given: Any) -> None:
        if os.listdir(str(used)):
            left.append(path.name)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *given)

    monkeypatch.setattr(writer, "write_summed", full)
    (used / "other.safetensors").write_bytes(b"x" * 100)
    monkeypatch.setattr(setup.engine.recorders[0].exchange, "fail", lambda *given: pytest.fail("there was room"))
    wanted = sequence_name([5, 6, 7])
    (setup.engine.dump / "want" / wanted).write_text("")
    setup.engine.recorders[0].writer._write(
        writer.Dump(wanted, setup.engine.dump / "done" / wanted, lambda: (lambda crc: crc.encode(), [b"data"]))
    )
    assert left == [wanted] and (setup.engine.dump / "done" / wanted).read_bytes()[8:] == b"data"


def test_the_output_disk_full_stops_the_run_and_keeps_what_is_done(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace
    placed: List[str] = []

    def replace(source: Any, target: Any) -> None:
        if "/hidden_states/hs_" in str(target):
            if len(placed) >= 5:
                raise OSError(28, "No space left on device")
            placed.append(str(target))
        real(source, target)

    monkeypatch.setattr(output.os, "replace", replace)
    code, result = setup.run()
    assert (code, result["outcome"]) == (1, "failed") and "is full" in result["message"], result
    assert result["counts"]["done"] == 5
    monkeypatch.undo()
    assert setup.run()[0] == 0
    setup.check()


@pytest.mark.parametrize("told", [True, False])
def test_a_full_dump_folder_is_waited_out_and_blames_no_sample(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Also one in which not even the reason has room. Every sample is hit more often than it may be tried."""
    hits: Dict[str, int] = {}
    real = writer.write_summed

    def full(path: Path, *given: Any) -> None:
        name = path.name.partition(".")[0]
        hits[name] = hits.get(name, 0) + 1
        if hits[name] > 2 or "rank" in path.name:
            real(path, *given)
        else:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "write_summed", full)
    if not told:
        monkeypatch.setattr(setup.engine.recorders[0].exchange, "fail", lambda *given: None)
        monkeypatch.setattr(exchange, "NO_ROOM", 1 << 62)
    monkeypatch.setattr(extract, "ROOM_PAUSE", 0.01)
    code, result = setup.run(retries=0, error_budget=0, dump_wait_s=0.3, outage_s=60, canary={"skip": True})
    assert code == 0 and result["counts"]["failed"] == 0, result
    setup.check()
    assert min(hits.values()) == 3


def test_a_dump_folder_that_stays_full_ends_the_run_and_blames_no_sample(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = writer.write_summed
    written: List[str] = []

    def full(path: Path, *given: Any) -> None:
        if len(written) >= 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path.name)
        real(path, *given)

    monkeypatch.setattr(writer, "write_summed", full)
    code, result = setup.run(outage_s=0.5, canary={"skip": True})
    assert (code, result["outcome"]) == (1, "failed") and "no space left in" in result["message"], result
    assert result["counts"]["failed"] == 0 and 8 <= result["counts"]["done"] <= 10  # two rows share a dump with another
    monkeypatch.undo()
    assert setup.run()[0] == 0
    setup.check()


def test_the_window_closes_and_the_next_run_goes_on(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    end = time.time() + 3600
    clock = SimpleNamespace(time=lambda: end * (len(setup.engine.requests) > 14), monotonic=time.monotonic)
    monkeypatch.setattr(extract, "time", clock)
    code, result = setup.run(stop_taking_work_at=end, in_flight=1)
    assert (code, result["outcome"]) == (3, "window"), result
    assert 0 < result["counts"]["done"] < len(ROWS)
    assert json.loads((setup.output / "manifest.json").read_text())["complete"] is False
    monkeypatch.undo()
    assert setup.run()[0] == 0
    setup.check()


def test_sigterm_finishes_what_is_in_flight_and_stops(setup: Setup) -> None:
    def wait(number: int, ids: List[int], answer: Any) -> Tuple[int, Any]:
        if number == 14:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05 if number > 10 else 0)
        return 200, answer

    setup.engine.fault = wait
    code, result = setup.run(in_flight=2)
    assert (code, result["outcome"]) == (3, "stopped"), result
    assert 0 < result["counts"]["done"] < len(ROWS) and result["counts"]["failed"] == 0
    assert os.listdir(str(setup.engine.dump / "want")) == []
    assert setup.run()[0] == 0
    setup.check()


def test_the_server_gone_ends_the_run_and_blames_no_sample(setup: Setup) -> None:
    def die(number: int, ids: List[int], answer: Any) -> Tuple[int, Any]:
        if number == 15:
            setup.engine._server.server_close()
        return 200, answer

    setup.engine.fault = die
    code, result = setup.run()
    assert (code, result["outcome"]) == (1, "failed") and "unreachable" in result["message"], result
    assert result["counts"]["failed"] == 0 and result["counts"]["done"] > 0


def test_no_dump_is_told(setup: Setup) -> None:
    setup.engine.recorders[0].begin = lambda batch: None  # type: ignore[method-assign]
    code, result = setup.run(dump_wait_s=0.2)
    assert code == 4 and "no dump came" in result["message"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"boundaries": [2, 3]}, "the capture on rank 0 was set up otherwise"),
        ({"cut_to": 3}, "cut_to: the folder has None, this run 3"),
    ],
)
def test_another_setup_on_one_output_is_refused(setup: Setup, change: Dict[str, Any], told: str) -> None:
    assert setup.run()[0] == 0
    code, result = setup.run(**change)
    assert code == 1 and told in result["message"]
    setup.check()


def test_a_changed_data_set_is_refused(setup: Setup) -> None:
    assert setup.run()[0] == 0
    setup.write_rows([{"input_ids": ids} for ids in reversed(ROWS)])
    code, result = setup.run()
    assert code == 1 and "dataset_sha256" in result["message"]


def test_two_clients_on_one_output(setup: Setup) -> None:
    first = output.Output(setup.output)
    first.open()
    code, result = setup.run()
    assert code == 1 and "another client is at work" in result["message"]
    first.close()
    assert setup.run()[0] == 0


def test_any_changed_bit_of_a_header_shows(setup: Setup) -> None:
    """Also where JSON and shapes stay right: the header vouches for itself, without the data being read."""
    assert setup.run()[0] == 0
    path = setup.output / "hidden_states" / "hs_3.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for place in range(8 + length):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 7]) + data[place + 1 :])
        with pytest.raises(SampleFault):
            dumpfile.read_header(path)
    path.write_bytes(data)
    assert dumpfile.read_header(path).metadata["name"] == sequence_name(ROWS[3])


def test_what_a_killed_client_left_half_written_goes(setup: Setup) -> None:
    assert setup.run()[0] == 0
    left = [
        "hidden_states/.hs_3.safetensors.part",
        ".manifest.json.x1y2",
        ".samples.jsonl.part",
        "quarantine/.hs_3.json.x1y2",
    ]
    for name in left:
        (setup.output / name).write_text("half")
    assert setup.run()[0] == 0
    assert [name for name in left if (setup.output / name).exists()] == []
    setup.check()


def test_a_shared_sample_leaves_quarantine_too(setup: Setup) -> None:
    """The twin of a sample is never asked for itself; what an earlier run kept of it must go all the same."""
    bad = ROWS[11]
    setup.engine.fault = lambda number, ids, answer: (400, {"error": "no"}) if ids == bad else (200, answer)
    skip = {"canary": {"sequences": 2, "positions": 8, "skip": True}}
    assert setup.run(error_budget=3, **skip)[0] == 0
    told = sorted(path.name for path in (setup.output / "quarantine").glob("*.json"))
    assert told == ["hs_11.json", "hs_17.json", "hs_2.json"]
    setup.engine.fault = lambda number, ids, answer: (200, answer)
    assert setup.run(**skip)[0] == 0
    setup.check()
    assert os.listdir(str(setup.output / "quarantine")) == []


def _shared(made: Setup, indices: List[int], only: bool = False) -> Dict[str, Any]:
    """The settings of a host that has these rows of the data set."""
    index = make_index(str(made.folder / "data.jsonl"), VOCAB, 100, None)
    dataset, sha256 = made.folder / "data.jsonl", ""
    if only:
        lines = dataset.read_text().splitlines()
        dataset = made.folder / "rows.jsonl"
        dataset.write_text("".join(lines[idx] + "\n" for idx in indices))
        sha256 = digest(dataset)
    (made.folder / "share").write_text(Share.of("a", index, indices, sha256).pack())
    return {"share": str(made.folder / "share"), "dataset": str(dataset)}


@pytest.mark.parametrize("only", [False, True])
def test_a_share_is_extracted_under_the_data_sets_own_numbers(setup: Setup, only: bool) -> None:
    mine = [3, 4, 9, 17]
    code, result = setup.run(**_shared(setup, mine, only))
    assert code == 0, result
    names = sorted(os.listdir(str(setup.output / "hidden_states")))
    assert names == sorted("hs_{}.safetensors".format(idx) for idx in mine)
    for idx in mine:
        with safe_open(str(setup.output / "hidden_states" / "hs_{}.safetensors".format(idx)), framework="pt") as handle:
            assert handle.get_tensor("token_ids").tolist() == ROWS[idx]
    lines = [json.loads(line) for line in (setup.output / "samples.jsonl").read_text().splitlines()]
    assert [(line["idx"], line["input_ids"]) for line in lines] == [(idx, ROWS[idx]) for idx in mine]
    told = json.loads((setup.output / "manifest.json").read_text())
    assert told["share"] == {"host": "a", "of_rows": len(ROWS), "samples": 4, "tokens": sum(len(ROWS[i]) for i in mine)}
    assert told["arrow"].get("rows", len(ROWS)) == len(ROWS)
    book = Manifest(setup.output, read_only=True)
    assert (book.counts()["total"], book.get("release")) == (4, told["engine"]["release"])
    book.close()


def test_a_share_that_grows_or_shrinks_leaves_what_is_done_and_nothing_pending(setup: Setup) -> None:
    assert setup.run(**_shared(setup, [1, 2, 3]))[0] == 0
    (setup.output / "hidden_states/hs_3.safetensors").unlink()  # and another host has it by now
    before = len(setup.engine.requests)
    code, result = setup.run(canary={"skip": True}, **_shared(setup, [1, 2, 5], only=True))
    assert code == 0 and len(setup.engine.requests) - before == 1, result
    book = Manifest(setup.output, read_only=True)
    assert [sample.idx for sample in book.samples()] == [1, 2, 5]
    assert book.counts()["pending"] == 0
    book.close()
    assert setup.run(canary={"skip": True})[0] == 0  # alone again: all of it
    setup.check()


def test_a_data_set_that_was_not_the_one_divided_is_refused(setup: Setup) -> None:
    words = _shared(setup, [1, 2])
    setup.write_rows([{"input_ids": ids} for ids in reversed(ROWS)])
    code, result = setup.run(**words)
    assert code == 1 and "is not the data set that was divided" in result["message"]
    assert setup.engine.requests == []

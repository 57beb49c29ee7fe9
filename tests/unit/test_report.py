"""A run's document and its page: what they say is what the run left, whole, escaped, and without a secret."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sglang_hs import figures, fsio, report
from sglang_hs.errors import HsError
from sglang_hs.journal import Journal, Paths
from sglang_hs.manifest import Manifest

REPO = Path(__file__).resolve().parents[2]
SECRET = "tok-0123456789abcdef"
EVIL = '</pre></td><script>alert("x")</script>{{ 7 * 7 }}'
VOID = {"meta", "link", "br", "img", "input", "hr", "line"}


def plugin(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_of_tests", REPO / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages, charts, played = (
    plugin("filter_plugins/hs_report.py"),
    plugin("filter_plugins/hs_charts.py"),
    plugin("lookup_plugins/hs_played.py"),
)


class Page(HTMLParser):
    """A page's elements: (name, attributes, all text within). Complains where one is not closed, or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, Any], list[str]]] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {[name for name, _ in self._open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        assert len({name for name, _ in attrs}) == len(attrs)
        if tag not in VOID:
            self._open.append((tag, self.elements[-1][2]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1][0] == tag, (tag, [name for name, _ in self._open])
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for _, texts in self._open:
            texts.append(data)

    def all(self, tag: str, kind: str = "") -> list[tuple[dict[str, Any], str]]:
        return [
            (attrs, "".join(texts))
            for name, attrs, texts in self.elements
            if name == tag and (not kind or kind in str(attrs.get("class")).split())
        ]

    def text(self) -> str:
        return " ".join(self.all("body")[0][1].split())


class Left:
    """What a run leaves on a host, written by the project's own code: a state folder and an output folder in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "out"
        self.paths = Paths(str(folder / "state"))
        self.paths.make()
        settings = {
            "window_s": 3600, "stop_timeout": 5, "dataset": "/data/set.jsonl", "output_dir": str(self.output), "dump_dir": "/dev/shm",
            "boundaries": [1, 2], "final": "both", "formats": ["native", "specforge"], "engine_python": "/engine/python",
            "production_expected": "running", "extraction_env": {"MY_TOKEN": "tok-of-the-run"},
            "command": ["/engine/python", "-m", "sglang.launch_server", "--api-key", SECRET, "--chunked-prefill-size", "-1"],
            "model": {"path": "/model", "architecture": "Kimi", "dtype": "float32"},
        }  # fmt: skip
        view = {
            "settings": settings, "flags": {}, "cwd": "/srv", "environment": {"NCCL_PROTO": "LL", "MY_TOKEN": "tok-of-the-run"},
            "production": "pid 1", "production_command": ["python", "--api-key=" + SECRET],
        }  # fmt: skip
        record = {
            "argv": ["python", "--api-key=" + SECRET], "env": {"HF_TOKEN": "hf-secret-value"}, "api_key": "", "expected": "running",
            "decode_rate": 120.0,
        }  # fmt: skip
        self.journal = Journal.open(self.paths, "me@laptop", view, {"window": "1h"}, record)
        self.journal.record("begin", "done")
        for step in ("stop", "launch", "extract"):
            with self.journal.step(step, 60):
                pass

    def rows(self, count: int, failed: int = 0, bad: int = 0) -> None:
        self.output.mkdir()
        book = Manifest(self.output, lag=3600)
        book.claim({"dataset_sha256": "d" * 64, "boundaries": [1, 2], "final": "both", "dtype": "float32"})
        for idx in range(count):
            length = 8 + idx * idx % 700
            book.add([(idx, str(idx), length, None)])
            if idx >= count - failed:
                book.failed(
                    idx, EVIL if idx == count - 1 else f"the server answered 503 after {idx} s ({SECRET[:4]}...)", 4
                )
                continue
            book.done(
                idx, f"hidden_states/hs_{idx}.safetensors", 100 * length, "0" * 64, 1 + (idx == 0), [1 + idx / count, 2.5, 30, 11]
            )  # fmt: skip
        book.add((idx, None, 0, f"row {idx} has no input_ids") for idx in range(count, count + bad))
        book.close()
        (self.output / "hidden_states").mkdir()

    def history(self, marks: list[tuple[float, int]], phase: str = "extract") -> None:
        with (self.journal.folder / "history.jsonl").open("a") as handle:
            for at, tokens in marks:
                line = {"at": at, "phase": phase, "tokens": tokens, "bytes": 1000 * tokens, "dump_free": 5_000_000 - tokens, "output_free": 10**9}  # fmt: skip
                handle.write(json.dumps(line) + "\n")

    def result(self, outcome: str, **more: Any) -> None:
        numbers = {
            "sequences": 4, "positions": 64, "ranks": 2, "rank_difference": 1e-6, "repeat_difference": 0.0, "logprob_difference": 0.5,
            "boundary_difference": {"1": 2e-5, "2": 3e-5}, "rms": {"boundary 1": 0.5}, "longest": 707, "together": 0,
            "state_tolerance": 1e-3, "logprob_tolerance": 0.02,
        }  # fmt: skip
        document = {"outcome": outcome, "message": "it is " + outcome, "canary": numbers, "seconds": 10.0, **more}
        fsio.write_json(self.journal.folder / "result.json", document)

    def close(self, why: str = "the run is over") -> None:
        with self.journal.step("restore", 60), self.journal.step("restore: check production", 60):
            self.journal.document["answers"] = {"at": self.journal.document["opened"] + 40, "decode_after": 119.0}
        self.journal.close("restored", why)

    def document(self, **given: Any) -> dict[str, Any]:
        found = report.find(str(self.paths.state))
        made = report.gather(str(self.paths.state), found, **given)
        return json.loads(json.dumps(made))  # as it comes out of the module


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path)


def test_the_document_of_a_complete_run(left: Left) -> None:
    left.rows(300)
    left.result("complete")
    left.close()
    found = left.document()
    assert (found["schema_version"], found["run"]["outcome"]) == (1, "complete")
    assert (found["samples"]["done"], found["this_run"]["samples"], found["this_run"]["retried"]) == (300, 300, 1)
    assert found["lengths"]["count"] == sum(entry["count"] for entry in found["lengths"]["bins"]) == 300
    assert found["production"]["down_from"] == next(
        step["begin"] for step in found["timeline"] if step["step"] == "stop"
    )
    assert found["production"]["down_to"] - found["run"]["opened"] == pytest.approx(40)
    assert (found["production"]["decode_before"], found["production"]["decode_after"]) == (120.0, 119.0)
    assert [state["name"] for state in found["norms"]] == [
        "boundary 1",
        "boundary 2",
        "final, pre-norm",
        "final, post-norm",
    ]
    assert [state["count"] for state in found["norms"]] == [300] * 4
    assert found["norms"][2]["p50"] == 30 and found["norms"][0]["p50"] == pytest.approx(1.5, rel=0.012)
    holds = {check["check"].split(",")[0]: check["holds"] for check in found["canary"]["checks"]}
    assert holds["lm_head(norm(final)) gives the server's own log-probabilities"] is False
    assert holds["boundary 2"] is True


def test_no_secret_is_in_the_document_nor_on_the_page(left: Left) -> None:
    left.rows(4)
    left.result("failed", message=f"401 for key {SECRET}")
    left.close()
    found = left.document(
        failure={"task": "t", "msg": f"it said {SECRET} and hf-secret-value and tok-of-the-run", "cut": False}
    )
    for text in (json.dumps(found), pages.page(found)):
        for secret in (SECRET, "hf-secret-value", "tok-of-the-run"):
            assert secret not in text
        assert "(hidden)" in text
    assert "--chunked-prefill-size -1</pre>" in pages.page(found)


def test_the_page_is_well_formed_and_escapes_what_strangers_wrote(left: Left) -> None:
    left.rows(60, failed=10, bad=30)
    left.result("error_budget")
    left.close()
    found = left.document(failure={"task": "<b>Watch</b>", "msg": EVIL, "cut": False})
    text = pages.page(found, host="<i>host</i>")
    page = Page(text)
    assert not page.all("script") and not page.all("b", "Watch") and "<i>host" not in text
    assert EVIL in page.text()
    assert "{{ 7 * 7 }}" in page.text()
    # nothing is fetched, nothing is run
    names = {name for _, attrs, _ in page.elements for name in attrs}
    assert not {name for name in names if name.startswith("on")} and not names & {"src", "href"}
    assert (
        "@import" not in text and "url(" not in text and "http" not in re.sub(r"<pre>.*?</pre>", "", text, flags=re.S)
    )
    alert = page.all("div", "alert")[0]
    assert "bad" in alert[0]["class"] and "Watch" in alert[1]
    assert page.all("span", "badge")[0][1] == "Too many samples failed"


def test_failures_are_counted_by_reason_and_the_list_is_cut(left: Left) -> None:
    left.rows(120, failed=50, bad=25)
    left.close()
    found = left.document()["errors"]
    assert found["total"] == 75 and len(found["rows"]) == report.SHOWN
    assert [kind["count"] for kind in found["reasons"]] == [49, 25, 1]
    assert found["reasons"][1]["first"] == [120, 121, 122, 123, 124]
    many = Manifest(left.output)
    many.add((1000 + idx, None, 0, "reason " + "x" * idx) for idx in range(60))
    many.commit()
    cut = report.errors(many)
    assert len(cut["reasons"]) == report.REASONS and cut["other"] == 60 - (report.REASONS - 3)
    assert sum(kind["count"] for kind in cut["reasons"]) + cut["other"] == cut["total"]
    many.close()


def drawn(page: Page, chart: str) -> list[list[dict[str, Any]]]:
    """The marks of each drawing inside a chart, told by what their data- attributes say."""
    marks: list[list[dict[str, Any]]] = []
    inside = False
    for name, attrs, _ in page.elements:
        if name == "section":
            inside = False
        if chart in str(attrs.get("class")).split():
            inside = True
        if inside and name == "svg":
            marks.append([])
        if inside and name == "rect" and any(key.startswith("data-") for key in attrs):
            marks[-1].append(attrs)
    return [group for group in marks if group]


def test_every_charts_numbers_are_the_documents(left: Left) -> None:
    left.rows(400)
    begin = left.journal.document["opened"]
    left.history([(begin + 5 * n, 100 * n * n) for n in range(60)])
    left.result("complete")
    left.close()
    found = left.document()
    page = Page(pages.page(found))

    (bars,) = drawn(page, "lengths")
    bins = found["lengths"]["bins"]
    assert [(int(bar["data-from"]), int(bar["data-to"]), int(bar["data-count"])) for bar in bars] == [
        (entry["from"], entry["to"], entry["count"]) for entry in bins
    ]
    scale = {float(bar["height"]) / int(bar["data-count"]) for bar in bars if bar["data-count"] != "0"}
    assert max(scale) == pytest.approx(min(scale), rel=1e-3)
    assert all(0 <= float(bar["x"]) and float(bar["x"]) + float(bar["width"]) <= 1000.01 for bar in bars)
    assert all(float(bar["y"]) + float(bar["height"]) == pytest.approx(100, abs=0.01) for bar in bars)

    tokens, sizes = drawn(page, "rate")[:2]
    points = found["throughput"]["points"]
    for marks, key in ((tokens, "tokens_per_s"), (sizes, "bytes_per_s")):
        assert [(float(mark["data-from"]), float(mark["data-value"])) for mark in marks] == [
            (point["from"], point[key]) for point in points
        ]
    done = sum(point["tokens_per_s"] * (point["to"] - point["from"]) for point in points)
    assert done == pytest.approx(100 * 59 * 59, rel=1e-3)

    strips = drawn(page, "strips")
    assert len(strips) == 4
    for marks, state in zip(strips, found["norms"], strict=True):
        assert [int(mark["data-count"]) for mark in marks] == [entry["count"] for entry in state["bins"]]
        assert sum(int(mark["data-count"]) for mark in marks) == 400

    steps = [mark for group in drawn(page, "steps") for mark in group]
    assert steps[0]["data-step"] == "production down"
    assert [(mark["data-step"], float(mark["data-begin"])) for mark in steps[1:]] == [
        (step["step"], step["begin"]) for step in found["timeline"]
    ]
    assert found["disk"]["dump"]["peak"] == 100 * 59 * 59


def test_too_few_marks_are_told_and_a_torn_line_is_passed_over(left: Left) -> None:
    left.rows(3)
    left.result("complete")
    assert "history.jsonl was not written" in left.document()["throughput"]["missing"]
    left.history([(1.0, 5), (2.0, 6)])
    with (left.journal.folder / "history.jsonl").open("a") as handle:
        handle.write('{"at": 3.0, "phase": "extr')
    left.close()
    found = left.document()
    assert found["throughput"]["points"] == [] and "over in 2 marks" in found["throughput"]["missing"]
    assert "No rates over time: it was over in 2 marks" in Page(pages.page(found)).text()


def test_a_client_that_was_started_again_begins_a_new_stretch(tmp_path: Path) -> None:
    lines = [(0, 0), (5, 500), (10, 1000), (20, 200), (25, 700)]
    path = tmp_path / "history.jsonl"
    path.write_text(
        "".join(json.dumps({"at": at, "phase": "extract", "tokens": n, "bytes": n}) + "\n" for at, n in lines)
    )
    found = figures.curve(path)
    assert [(point["from"], point["to"], point["tokens_per_s"]) for point in found["points"]] == [
        (0, 5, 100), (5, 10, 100), (20, 25, 100),
    ]  # fmt: skip
    assert found["mean_tokens_per_s"] == 100


@pytest.mark.parametrize(
    "counted", [[(7, 1)], [(1, 5), (2, 1)], [(n, 1) for n in range(1, 5000, 3)], [(10, 1000), (20, 9), (8192, 1)]]
)
def test_bins_hold_each_length_once(counted: list[tuple[int, int]]) -> None:
    found = figures.lengths(counted)
    assert sum(entry["count"] for entry in found["bins"]) == sum(count for _, count in counted)
    for entry in found["bins"]:
        assert entry["count"] == sum(n for length, n in counted if entry["from"] <= length < entry["to"])
    assert 1 <= len(found["bins"]) <= 40
    assert found["bins"][0]["from"] <= found["min"] and found["max"] < found["bins"][-1]["to"]
    text = str(charts.bars(found["bins"], found["scale"], "samples", "tokens", "lengths"))
    assert text.count("<rect") == len(found["bins"]) and "nan" not in text


@pytest.mark.parametrize("width", [1, 0.5, 9, 100, 4000, 30000, 200000])
def test_ticks_are_round_few_and_inside(width: float) -> None:
    for low in (0.0, 3.7, 1234.5):
        marks = charts.ticks(low, low + width)
        assert 1 <= len(marks) <= 6 and all(low <= mark <= low + width * 1.000001 for mark in marks)
        logs = charts.log_ticks(low + 0.5, low + 0.5 + width)
        assert len(logs) <= 6
        times = charts.clock_ticks(1.79e9 + low, 1.79e9 + low + width, 3600)
        assert len(times) <= 5
        assert len({text for _, text in times}) == len(times)


def test_outcomes(left: Left) -> None:
    assert left.document()["run"]["outcome"] == "open"
    assert Page(pages.page(left.document())).all("span", "badge")[0][1] == "Still open"
    cut = left.document(failure={"task": "Watch", "msg": "the window closed", "cut": True})
    assert cut["run"]["outcome"] == "window" and "warn" in Page(pages.page(cut)).all("div", "alert")[0][0]["class"]
    left.close("guard: the host was rebooted during the run")
    found = left.document()
    assert (found["run"]["outcome"], found["run"]["headline"]) == (
        "failed", "ended at extract: guard: the host was rebooted during the run",
    )  # fmt: skip
    assert found["samples"] is None and "no output folder" in Page(pages.page(found)).text()


def test_a_step_that_met_the_guards_restore_is_a_cut_not_a_failure(left: Left) -> None:
    left.close("guard: the window closed")
    failure = {"task": "Start the extraction", "msg": "another step of this project is at work", "cut": False}
    assert left.document(failure=failure)["run"]["outcome"] == "window"


def test_the_document_is_kept_beside_the_output_and_outlives_the_journal(left: Left) -> None:
    left.rows(5)
    left.result("complete")
    left.close()
    state = str(left.paths.state)
    found = report.find(state)
    assert report.kept(state, found) is None
    path = report.keep(state, found, report.gather(state, found))
    assert path == left.output / "runs" / (found.run_id + ".json")
    assert report.kept(state, found) is not None
    subprocess.run(["rm", "-rf", str(left.paths.runs)], check=True)
    again = report.find(state, output_dir=str(left.output))
    assert (again.run_id, again.journal) == (found.run_id, {})
    document = report.kept(state, again)
    assert document is not None and document["run"]["outcome"] == "complete"
    with pytest.raises(HsError, match="no run 20200101-000000-0000 is known"):
        report.find(state, "20200101-000000-0000", str(left.output))
    # not even the document: the book alone still tells what is there
    path.unlink()
    (left.output / "manifest.json").write_text(json.dumps({"run_id": found.run_id, "canary": {}}))
    bare = report.gather(state, report.find(state, output_dir=str(left.output)))
    assert (bare["run"]["outcome"], bare["samples"]["done"], bare["timeline"]) == ("complete", 5, [])
    assert "journal is gone" in Page(pages.page(bare)).text()


def test_a_runs_document_is_found_where_its_output_was_moved_and_never_made_from_anothers(left: Left) -> None:
    left.rows(5)
    left.result("complete")
    left.close()
    state = str(left.paths.state)
    found = report.find(state)
    report.keep(state, found, report.gather(state, found))
    moved = left.output.rename(left.output.with_name("moved"))
    left.output.mkdir()
    book = Manifest(left.output)
    book.claim({"dataset": "another"})
    book.set("begun", found.journal["closed"]["at"] + 10)
    book.close()
    document = report.kept(state, report.find(state, found.run_id, str(moved)))
    assert document is not None and document["samples"]["done"] == 5
    # where nothing says where it went, the other extraction's numbers are not taken for this run's, nor is its folder written to
    lost = report.find(state, found.run_id)
    assert lost.output is None and report.gather(state, lost)["samples"] is None
    assert report.keep(state, lost, report.gather(state, lost)).parent == left.journal.folder


def test_a_second_runs_page_names_the_first(tmp_path: Path, left: Left) -> None:
    left.rows(5)
    left.close()
    state = str(left.paths.state)
    first = report.find(state)
    report.keep(state, first, report.gather(state, first))
    later = dict(first.journal, run_id="20991231-000000-beef", opened=first.journal["opened"] + 100)
    document = report.gather(state, report.Found(later["run_id"], later, left.output))
    assert [run["id"] for run in document["earlier"]] == [first.run_id]
    assert document["earlier"][0]["samples"] == 5
    assert first.run_id in Page(pages.page(document)).text()


def test_loading_is_the_pages_own_code_with_this_runs_folder(left: Left) -> None:
    left.close()
    found = dict(left.document(), output={"path": "/srv/it's here", "there": True})
    blocks = {entry["format"]: entry for entry in pages.loading(found)}
    assert set(blocks) == {"native", "specforge"}
    assert blocks["specforge"]["folder"] == "/srv/it's here-specforge"
    for entry in blocks.values():
        compile(entry["code"], "page", "exec")
        assert entry["folder"] in entry["code"] and "/data/hidden-states" not in entry["code"]


def test_a_document_of_another_schema_is_refused(left: Left) -> None:
    with pytest.raises(ValueError, match="schema 99"):
        pages.page(dict(left.document(), schema_version=99))


@pytest.mark.parametrize(
    "words",
    [
        ["-e", f"hs_api_key={SECRET}"],
        ["-e", json.dumps({"hs_window": "6h", "hs_extraction_env": {"HF_TOKEN": SECRET}})],
        [f"--extra-vars={{hs_api_key: {SECRET}}}"],
        [f"-ehs_api_key='{SECRET} x'"],
        ["-e", f"{{hs_api_key: {SECRET}"],
    ],
)
def test_the_command_is_told_without_its_secrets(words: list[str]) -> None:
    shown = played.without_secrets(["ansible-playbook", "extract.yml", "-e", "hs_window=6h a=b", *words, "-i", "inv"])
    assert SECRET not in " ".join(shown) and "(hidden)" in " ".join(shown)
    assert shown[:4] == ["ansible-playbook", "extract.yml", "-e", "hs_window=6h a=b"] and shown[-2:] == ["-i", "inv"]


def test_the_playbook_makes_a_page_from_a_document_without_a_host(left: Left, tmp_path: Path) -> None:
    left.rows(30, failed=3)
    left.close()
    document = tmp_path / "run.json"
    document.write_text(json.dumps(left.document()))
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "ANSIBLE_HOME": str(tmp_path / "a"),
        "ANSIBLE_REMOTE_TEMP": str(tmp_path / "remote"),
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
    }
    words = [
        str(Path(sys.executable).parent / "ansible-playbook"),
        "playbooks/report.yml",
        "-i",
        str(tmp_path / "none.ini"),
    ]
    (tmp_path / "none.ini").write_text("")
    extra = json.dumps({"hs_report_document": str(document), "hs_report_dir": str(tmp_path / "pages")})
    changes = []
    for _ in range(2):
        done = subprocess.run([*words, "-e", extra], cwd=REPO, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        changes.append("changed=0" in done.stdout)
    assert changes == [False, True]
    (path,) = (tmp_path / "pages").iterdir()
    assert EVIL in Page(path.read_text()).text()


@pytest.mark.parametrize(
    "connection", [{}, {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}]
)
def test_a_report_that_cannot_be_made_changes_no_outcome_and_hides_no_failure(
    tmp_path: Path, connection: dict[str, Any]
) -> None:
    """The end of extract.yml with a report that fails: on a host without such a run, and on one that is gone."""
    book = tmp_path / "book.yml"
    tasks = [
        {"block": [{"ansible.builtin.fail": {"msg": "the first"}, "when": "broken"}],
         "rescue": [{"ansible.builtin.import_role": {"name": "restore_production", "tasks_from": "remember"}}],
         "always": [
             {"ansible.builtin.import_role": {"name": "report", "tasks_from": "attempt"}, "vars": {"hs_report_run": "{{ run }}"}},
             {"ansible.builtin.import_role": {"name": "restore_production", "tasks_from": "raise"}},
         ]},
    ]  # fmt: skip
    book.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    inventory = tmp_path / "hosts.json"
    inventory.write_text(json.dumps({"all": {"hosts": {"there": {"ansible_connection": "local", **connection}}}}))
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "ANSIBLE_HOME": str(tmp_path / "a"),
        "ANSIBLE_REMOTE_TEMP": str(tmp_path / "remote"),
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
    }
    for broken, status in ((False, 0), (True, 2)):
        extra = {
            "hs_state_dir": str(tmp_path / "state"),
            "hs_report_dir": str(tmp_path / "pages"),
            "broken": broken,
            "run": "20200101-000000-0000",
        }
        words = [
            str(Path(sys.executable).parent / "ansible-playbook"),
            str(book),
            "-i",
            str(inventory),
            "-e",
            json.dumps(extra),
        ]
        done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stdout + done.stderr
        assert "the report was not written" in done.stdout
        if broken:
            assert "the first" in done.stdout[done.stdout.rindex("Fail as the run failed") :]
    assert not list(tmp_path.glob("pages/*"))
    # a play that was refused before it had a run says nothing of reports
    words[-1] = json.dumps({**extra, "run": "none"})
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "report was not written" not in done.stdout


def test_what_moved_on_is_told_and_what_is_still_here(left: Left) -> None:
    left.rows(6)
    left.result("complete", moving={"held_s": 3725.0, "wrong": 2, "error": "", "verified_by": "the remote's md5"})
    left.close()
    assert left.document()["moving"] is None
    assert "Moved" not in Page(pages.page(left.document())).text()
    book = Manifest(left.output)
    book.moved("far:a", [0, 1, 2, 3])
    book.close()
    found = left.document()
    assert found["moving"] == {
        "to": "far:a", "here": 2, "moved": 4, "bytes_moved": 100 * (8 + 9 + 12 + 17), "archives": 0,
        "held_s": 3725.0, "wrong": 2, "error": "", "verified_by": "the remote's md5",
    }  # fmt: skip
    text = Page(pages.page(found)).text()
    assert "to far:a, verified by the remote's md5; 2 are still here, the extraction waited 1 h 02 min" in text
    assert "2 files were wrong there and sent again" in text

"""The report and the cleaning up, on what real runs of these tests left on the host."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from local_host import Host


def page(host: Host, run_id: str) -> Path:
    return host.folder / f"reports/localhost-{run_id}.html"


def flat(text: str) -> str:
    return " ".join(text.split())


def test_extract_wrote_a_page_and_report_makes_the_same_again(host: Host, finished: Path) -> None:
    document: dict[str, Any] = json.loads(next((finished / "runs").glob("*.json")).read_text())
    run_id = document["run"]["id"]
    written = host.finished_page.read_text()
    told = json.loads((finished / "manifest.json").read_text())
    assert document["samples"] == told["counts"] and document["run"]["outcome"] == "complete"
    assert document["lengths"]["tokens"] == told["counts"]["tokens_done"]
    # every state of every sample was measured by the client
    assert [state["count"] for state in document["norms"]] == [64] * 5
    assert document["canary"]["checks"] and all(check["holds"] for check in document["canary"]["checks"])
    production = document["production"]
    assert document["run"]["opened"] < production["down_from"] < production["down_to"] < document["run"]["closed"]
    assert production["decode_before"] > 0 and production["decode_after"] > 0
    command = document["commands"]["playbook"]["argv"]
    assert command[:3] == ["ansible-playbook", "playbooks/extract.yml", "-i"]
    for what in (
        run_id,
        "64",
        f"{told['counts']['tokens_done']:,}",
        "--disable-radix-cache",
        told["dataset"]["sha256"],
    ):
        assert what in written

    page(host, run_id).unlink(missing_ok=True)
    played = host.play("report", extra={"hs_report_run": run_id, "hs_output_dir": str(finished)})
    assert played.code == 0, played.out
    assert page(host, run_id).read_text() == written
    again = host.play("report", extra={"hs_report_run": run_id, "hs_output_dir": str(finished)})
    assert (again.code, again.recap("changed")) == (0, 0), again.out


def test_a_failed_runs_page_says_so_and_a_page_that_cannot_be_written_changes_nothing(
    host: Host, finished: Path
) -> None:
    before = host.signature()
    wrong = {"hs_extra_arguments": ["--dtype", "float33"], "hs_report_dir": "/proc/none"}
    played = host.play("extract", extra={**wrong, "hs_output_dir": str(host.folder / "failing")})
    assert played.code == 2, played.out
    host.assert_back(before)
    assert "the report was not written" in flat(played.out)
    end = flat(played.out[played.out.rindex("Fail as the run failed") :])
    assert "float33" in end and "/proc/none" not in end

    made = host.play("report")  # the last run
    assert made.code == 0, made.out
    newest = max((host.state / "runs").glob("*/journal.json"), key=lambda path: path.stat().st_mtime).parent
    text = page(host, newest.name).read_text()
    assert '<div class="alert bad">' in text and "float33" in text and ">Failed<" in text
    document = json.loads((newest / "report.json").read_text())  # it came to no output folder
    launch = next(step for step in document["timeline"] if step["step"] == "launch")
    assert launch["state"] == "failed" and document["production"]["down_to"] is not None


def test_clean_lists_and_removes_only_what_is_named(host: Host, finished: Path) -> None:
    copy = host.folder / "spare"
    shutil.copytree(finished, copy)
    extra = {"hs_output_dir": str(copy)}
    listed = host.play("clean", extra=extra)
    assert (listed.code, listed.recap("changed")) == (0, 0), listed.out
    ids = sorted(path.name for path in (host.state / "runs").iterdir())
    for run_id in ids:
        assert f"run {run_id}: " in flat(listed.out)
    assert f"output {copy}: 64 of 64 samples, complete" in flat(listed.out)

    looked = host.play("clean", "--check", extra={**extra, "hs_clean": str(copy)})
    assert looked.code == 0 and f"would remove {copy}: " in flat(looked.out), looked.out
    assert (copy / "manifest.sqlite").is_file()
    removed = host.play("clean", extra={**extra, "hs_clean": str(copy)})
    assert removed.code == 0 and f"removed {copy}: " in flat(removed.out), removed.out
    assert not copy.exists() and (finished / "manifest.sqlite").is_file()
    refused = host.play("clean", extra={**extra, "hs_clean": str(host.folder)})
    assert refused.code == 2 and "is not among the runs and output folders" in flat(refused.out)
    assert sorted(path.name for path in (host.state / "runs").iterdir()) == ids
    host.production()

"""Every command of the pages that a healthy host answers, in the pages' order, and the facts that a run leaves."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_run import ROWS, Pages, docs_text, few_rows, told
from local_host import REPO, Host, Played


@pytest.fixture(scope="module")
def extra(host: Host) -> dict[str, Any]:
    return {"hs_dataset": str(few_rows(host.folder)), "hs_output_dir": str(host.folder / "docs")}


@pytest.fixture(scope="module")
def result(host: Host, extra: dict[str, Any]) -> dict[str, Any]:
    """An extraction of a few rows; what it left in hs_result."""
    before = host.signature()
    played, fact = told(host, extra)
    assert played.code == 0, played.out
    host.assert_back(before)
    return fact


@pytest.fixture
def pages(host: Host, extra: dict[str, Any], result: dict[str, Any]) -> Pages:
    """With the output complete, as the demo leaves it."""
    return Pages(host, Path(extra["hs_output_dir"]), extra)


def test_the_result_of_a_run_is_one_fact(host: Host, extra: dict[str, Any], result: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in Path(extra["hs_dataset"]).read_text().splitlines()]
    files = list((Path(extra["hs_output_dir"]) / "hidden_states").glob("hs_*.safetensors"))
    assert result["outcome"] == "complete"
    assert result["samples"] == len(files) == ROWS
    assert result["tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert result["bytes"] == sum(path.stat().st_size for path in files)
    assert (result["output"], result["production"]) == (extra["hs_output_dir"], "back")
    assert result["run_id"] in Path(result["report"]).read_text()
    assert result["logs"] == str(host.state / "runs" / result["run_id"])
    assert json.loads((Path(result["logs"]) / "journal.json").read_text())["run_id"] == result["run_id"]
    keys = {
        line.split("`")[1]
        for line in (REPO / "docs/tags.md").read_text().splitlines()
        if line.startswith("| `outcome`")
    }
    assert keys <= set(result)
    for key in result:
        assert f"`{key}`" in (REPO / "docs/tags.md").read_text(), key


def test_the_result_where_nothing_was_to_do(host: Host, extra: dict[str, Any], result: dict[str, Any]) -> None:
    (host.folder / "result.json").unlink()
    played, again = told(host, extra)
    assert played.code == 0, played.out
    same = ("samples", "tokens", "bytes", "output")
    assert {key: again[key] for key in same} == {key: result[key] for key in same}
    assert (again["outcome"], again["production"], again["run_id"]) == ("nothing to do", "not touched", "")


def test_report(pages: Pages, result: dict[str, Any], tmp_path: Path) -> None:
    page = Path(result["report"])
    written = page.read_text()
    pages.good("ansible-playbook playbooks/report.yml -i inventory/rtx6000bw", changed=False)
    page.unlink()
    pages.good(
        "ansible-playbook playbooks/report.yml -i inventory/rtx6000bw -e hs_report_run=RUN",
        changed=True,
        RUN=result["run_id"],
    )
    assert page.read_text() == written
    pages.good(
        "ansible-playbook playbooks/report.yml -e hs_report_document=RUN.json",
        changed=True,
        extra={"hs_report_dir": str(tmp_path)},
        RUN=pages.output / "runs" / result["run_id"],
    )
    (alone,) = tmp_path.glob("*.html")
    assert alone.name.endswith(f"-{result['run_id']}.html") and f"{result['tokens']:,}" in alone.read_text()


def test_cleaning_up(pages: Pages, result: dict[str, Any]) -> None:
    copy = pages.host.folder / "docs-copy"
    shutil.copytree(pages.output, copy)
    old = Pages(pages.host, copy, {**pages.extra, "hs_output_dir": str(copy)})
    said = old.good("ansible-playbook playbooks/clean.yml -i inventory/rtx6000bw", changed=False)
    assert f"run {result['run_id']}: complete" in said and f"output {copy}: {ROWS} of {ROWS} samples, complete" in said
    logs = Path(result["logs"])
    kept = pages.host.folder / "kept-logs"
    shutil.copytree(logs, kept)
    old.good(
        "ansible-playbook playbooks/clean.yml -i inventory/rtx6000bw -e hs_clean=RUN",
        changed=True,
        RUN=result["run_id"],
    )
    assert not logs.exists() and (copy / "manifest.json").exists()
    kept.rename(logs)
    old.good(
        "ansible-playbook playbooks/clean.yml -i inventory/rtx6000bw -e hs_clean=/data/hidden-states", changed=True
    )
    assert not copy.exists() and pages.output.exists()


def test_quickstart(pages: Pages) -> None:
    assert "demo-stop" in pages.good("make help")
    pages.good('export PATH="$PWD/.venv/bin:$PATH"')
    pid = pages.host.production().pid
    pages.good("ansible-playbook playbooks/plan.yml -i inventory/local", changed=False)
    said = pages.good("ansible-playbook playbooks/extract.yml -i inventory/local", changed=False)
    assert "nothing to do" in said
    assert "no run is open" in pages.good("ansible-playbook playbooks/status.yml -i inventory/local", changed=False)
    pages.good("ansible-playbook playbooks/restore.yml -i inventory/local", changed=False)
    assert pages.host.production().pid == pid


def test_real_host(pages: Pages) -> None:
    pid = pages.host.production().pid
    assert "ping: pong" in pages.good("ansible sglang -i inventory/rtx6000bw -m ansible.builtin.ping")
    pages.good("ansible-playbook playbooks/plan.yml -i inventory/rtx6000bw", changed=False)
    elsewhere = {"hs_output_dir": str(pages.host.folder / "not-made")}
    said = pages.good(
        "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --check --diff", changed=True, extra=elsewhere
    )
    assert "_hs_capture.attach(self)" in said and "---num-continuous-decode-steps 4" in said
    assert not Path(elsewhere["hs_output_dir"]).exists()
    pages.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", changed=False)
    assert "production: " in pages.good("ansible-playbook playbooks/status.yml -i inventory/rtx6000bw", changed=False)
    written = REPO / "status.json"
    try:
        pages.good(
            "ansible-playbook playbooks/status.yml -i inventory/rtx6000bw -e hs_status_file=status.json", changed=False
        )
        found = [path for path in (written, REPO / "playbooks/status.json") if path.exists()]
        assert json.loads(found[0].read_text())["localhost"]["production"]["healthy"] is True
    finally:
        for path in (written, REPO / "playbooks/status.json"):
            path.unlink(missing_ok=True)
    assert "next: nothing: no run is open" in pages.good("/var/lib/sglang-hs/hs status")
    pages.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw", changed=False)
    pages.good("/var/lib/sglang-hs/hs restore")
    assert pages.host.production().pid == pid


def test_real_host_afterwards(pages: Pages) -> None:
    said = pages.good(
        "PYTHONPATH=/var/lib/sglang-hs/lib /opt/sglang/bin/python -m sglang_hs_client verify --output /data/hidden-states --checksums"
    )
    assert str(ROWS) in said
    formats = {"hs_formats": ["native", "modelopt"]}
    pages.good("ansible-playbook playbooks/export.yml -i inventory/rtx6000bw --check", changed=True, extra=formats)
    assert not Path(f"{pages.output}-modelopt").exists()
    pages.good("ansible-playbook playbooks/export.yml -i inventory/rtx6000bw", changed=True, extra=formats)
    assert len(list(Path(f"{pages.output}-modelopt").glob("row_*.pt"))) == ROWS


def test_tags(pages: Pages) -> None:
    before, pid = pages.host.signature(), pages.host.production().pid
    work = {"hs_output_dir": str(pages.host.folder / "never-made")}
    said = pages.good(
        "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --tags patch", changed=True, extra=work
    )
    assert "TASK [backup_and_patch : Back up the engine's source and edit it]" in said
    assert "TASK [stop_server : Stop production]" not in said and "TASK [run_extraction : Start" not in said
    assert pages.host.production().pid == pid
    pages.host.assert_back(before)
    said = pages.good(
        "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --tags preflight --check", extra=work
    )
    assert "TASK [preflight : Show the plan]" in said and "TASK [backup_and_patch : Back up" not in said
    listed = pages.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --list-tags")
    page = (REPO / "docs/tags.md").read_text()
    _, play, _ = yaml.safe_load((REPO / "playbooks/extract.yml").read_text())  # between those that divide and merge
    checks, run = play["tasks"]
    steps = [tag for task in [checks, *run["block"]] for tag in task["tags"]]
    at_the_end = [tag for task in run["always"] for tag in task["tags"]]
    assert f"TASK TAGS: [{', '.join(sorted(set(steps)))}]" in listed
    rows = re.findall(r"(?m)^\| `(\w+)` \| ", page[: page.index("## One host")])
    assert set(rows) == {*steps, *at_the_end, "catalogue"} - {"always"}
    assert "TASK TAGS: [always, catalogue]" in listed
    assert "stop_server : Stop production" in pages.good(
        "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --list-tasks"
    )
    pages.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --limit rtx6000bw", changed=False)
    played = pages.doc(
        'ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --start-at-task "Stop production"', extra=work
    )
    assert played.code == 2, played.out
    assert pages.host.production().pid == pid
    pages.host.assert_back(before)


def test_the_result_is_written_down_too(pages: Pages) -> None:
    path = REPO / "result.json"
    try:
        pages.good(
            "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw -e hs_result_file=result.json", changed=False
        )
        found = [place for place in (path, REPO / "playbooks/result.json") if place.exists()]
        assert json.loads(found[0].read_text())["outcome"] == "nothing to do"
    finally:
        for place in (path, REPO / "playbooks/result.json"):
            place.unlink(missing_ok=True)


def test_a_step_without_the_one_before_refuses_and_production_is_not_touched(pages: Pages) -> None:
    before, pid = pages.host.signature(), pages.host.production().pid
    extra = {**pages.extra, "hs_output_dir": str(pages.host.folder / "never-made")}
    out = pages.host.folder / "refused.json"
    played = pages.host.play("extract", "--tags", "extract", extra={**extra, "hs_result_file": str(out)})
    assert played.code == 2, played.out
    assert "the extraction server was not launched" in " ".join(played.out.split())
    assert pages.host.production().pid == pid
    pages.host.assert_back(before)
    result = json.loads(out.read_text())
    assert (result["outcome"], result["samples"], result["production"]) == ("failed", 0, "back")
    assert "the extraction server was not launched" in result["message"] and result["run_id"]


def test_without_ansible(pages: Pages) -> None:
    pages.good("/var/lib/sglang-hs/hs status")
    assert json.loads(pages.good("/var/lib/sglang-hs/hs status --json"))["open"] is False
    assert "no run is open" in pages.good("/var/lib/sglang-hs/hs restore --dry-run")
    pages.good("/var/lib/sglang-hs/hs restore")
    pages.good("PYTHONPATH=/var/lib/sglang-hs/lib python3 -m sglang_hs status --state-dir /var/lib/sglang-hs")
    pages.good(
        "PYTHONPATH=/var/lib/sglang-hs/lib /opt/sglang/bin/python -m sglang_hs_client verify --output /data/hidden-states"
    )
    pages.good(
        "PYTHONPATH=/var/lib/sglang-hs/lib /opt/sglang/bin/python -m sglang_hs_client export --output /data/hidden-states --format native"
    )
    pages.good(
        "PYTHONPATH=/var/lib/sglang-hs/lib /opt/sglang/bin/python -m sglang_hs_client export --output /data/hidden-states"
        " --format modelopt --to /data/hidden-states-modelopt --dry-run"
    )


@pytest.mark.parametrize("name", ["layers", "without-ansible"])
def test_the_python_of_the_pages_runs(pages: Pages, name: str) -> None:
    code = pages.replaced(docs_text.block(name))
    ending = {"layers": "print(len(manifest['slots']))", "without-ansible": "print(states.shape[0] == len(ids))"}[name]
    done = subprocess.run(
        [str(pages.engine_python), "-c", f"{code}\n{ending}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == {"layers": "4", "without-ansible": "True"}[name]


def on_a_terminal(host: Host, **more: str) -> str:
    """What status.yml prints where its output is a terminal."""
    leader, follower = pty.openpty()
    words = host.command("status")
    with subprocess.Popen(
        words, cwd=REPO, env={**host.env, "TERM": "xterm", **more}, stdout=follower, stderr=follower
    ) as playing:
        os.close(follower)
        said = b""
        with contextlib.suppress(OSError):  # the end of a terminal is an error
            while chunk := os.read(leader, 65536):
                said += chunk
        assert playing.wait(timeout=120) == 0, said
    os.close(leader)
    return said.decode()


def test_colours_come_on_a_terminal_only_and_can_be_turned_off(pages: Pages) -> None:
    assert "\x1b[0;32m" in on_a_terminal(pages.host)
    assert "\x1b[0;32m" not in on_a_terminal(pages.host, NO_COLOR="1")
    pages.good("ansible-playbook playbooks/status.yml -i inventory/rtx6000bw")  # which looks for colours


def test_one_host_that_is_refused_does_not_stop_another(pages: Pages, tmp_path: Path) -> None:
    hosts = {"one": {"hs_dataset": pages.extra["hs_dataset"]}, "two": {"hs_dataset": "/nowhere.jsonl"}}
    common = {"ansible_connection": "local", "ansible_python_interpreter": "{{ ansible_playbook_python }}"}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"sglang": {"hosts": hosts, "vars": common}}))
    (tmp_path / "group_vars").symlink_to(REPO / "inventory/local/group_vars")
    given = {key: value for key, value in pages.extra.items() if key != "hs_dataset"}

    def play(*words: str) -> Played:
        line = [
            pages.host.command("extract")[0],
            "playbooks/extract.yml",
            "-i",
            str(tmp_path),
            "-e",
            json.dumps(given),
            *words,
        ]
        done = subprocess.run(
            line,
            cwd=REPO,
            env=pages.host.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return Played(done.returncode, done.stdout)

    both = play()
    assert both.code == 2, both.out
    recap = {line.split()[0]: line for line in both.out.splitlines() if "failed=" in line}
    assert "failed=0" in recap["one"] and "failed=1" in recap["two"]
    assert "nothing to do: all" in " ".join(both.out.split())
    alone = play("--limit", "one")
    assert alone.code == 0 and "two" not in alone.out[alone.out.index("PLAY RECAP") :], alone.out

"""Every command of the pages that a healthy host answers, in the pages' order, and the facts that a run leaves."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from docs_session import ROWS, Session, docs_text, few_rows
from local_host import REPO, Host, Played


def told(host: Host, extra: dict[str, Any]) -> tuple[Played, dict[str, Any]]:
    """Run the play that tags.md prints after extract.yml, which also writes hs_result down; the fact."""
    book, out = host.folder / "tell.yml", host.folder / "result.json"
    text = docs_text.block("playbooks/tell.yml").replace(
        "import_playbook: extract.yml", f"import_playbook: {REPO}/playbooks/extract.yml"
    )
    text += (
        "\n    - name: Write it down\n      ansible.builtin.copy:\n"
        f'        content: "{{{{ hs_result | to_json }}}}"\n        dest: "{out}"\n        mode: "0600"\n'
    )
    book.write_text(text)
    words = [host.command("extract")[0], str(book), "-i", "inventory/local", "-e", json.dumps(extra)]
    done = subprocess.run(
        words, cwd=REPO, env=host.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    return Played(done.returncode, done.stdout), json.loads(out.read_text()) if out.exists() else {}


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
def session(host: Host, extra: dict[str, Any], result: dict[str, Any]) -> Session:
    """With the output complete, as the demo leaves it."""
    return Session(host, Path(extra["hs_output_dir"]), extra)


def test_the_result_of_a_run_is_one_fact(host: Host, extra: dict[str, Any], result: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in Path(extra["hs_dataset"]).read_text().splitlines()]
    files = list((Path(extra["hs_output_dir"]) / "hidden_states").glob("hs_*.safetensors"))
    assert result["outcome"] == "complete"
    assert result["samples"] == len(files) == ROWS
    assert result["tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert result["bytes"] == sum(path.stat().st_size for path in files)
    assert (result["output"], result["production"]) == (extra["hs_output_dir"], "back")
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


def test_quickstart(session: Session) -> None:
    assert "demo-stop" in session.good("make help")
    session.good('export PATH="$PWD/.venv/bin:$PATH"')
    pid = session.host.production().pid
    session.good("ansible-playbook playbooks/plan.yml -i inventory/local", changed=False)
    said = session.good("ansible-playbook playbooks/extract.yml -i inventory/local", changed=False)
    assert "nothing to do" in said
    assert "no run is open" in session.good("ansible-playbook playbooks/status.yml -i inventory/local", changed=False)
    session.good("ansible-playbook playbooks/restore.yml -i inventory/local", changed=False)
    assert session.host.production().pid == pid


def test_real_host(session: Session) -> None:
    pid = session.host.production().pid
    assert "ping: pong" in session.good("ansible sglang -i inventory/rtx6000bw -m ansible.builtin.ping")
    session.good("ansible-playbook playbooks/plan.yml -i inventory/rtx6000bw", changed=False)
    elsewhere = {"hs_output_dir": str(session.host.folder / "not-made")}
    said = session.good(
        "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --check --diff", changed=True, extra=elsewhere
    )
    assert "_hs_capture.attach(self)" in said and "---num-continuous-decode-steps 4" in said
    assert not Path(elsewhere["hs_output_dir"]).exists()
    session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", changed=False)
    assert "production: " in session.good("ansible-playbook playbooks/status.yml -i inventory/rtx6000bw", changed=False)
    written = REPO / "status.json"
    try:
        session.good(
            "ansible-playbook playbooks/status.yml -i inventory/rtx6000bw -e hs_status_file=status.json", changed=False
        )
        found = [path for path in (written, REPO / "playbooks/status.json") if path.exists()]
        assert json.loads(found[0].read_text())["localhost"]["production"]["healthy"] is True
    finally:
        for path in (written, REPO / "playbooks/status.json"):
            path.unlink(missing_ok=True)
    assert "next: nothing: no run is open" in session.good("/var/lib/sglang-hs/hs status")
    session.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw", changed=False)
    session.good("/var/lib/sglang-hs/hs restore")
    assert session.host.production().pid == pid


def test_real_host_afterwards(session: Session) -> None:
    said = session.good(
        "PYTHONPATH=/var/lib/sglang-hs/lib /opt/sglang/bin/python -m sglang_hs_client verify --output /data/hidden-states --checksums"
    )
    assert str(ROWS) in said
    formats = {"hs_formats": ["native", "modelopt"]}
    session.good("ansible-playbook playbooks/export.yml -i inventory/rtx6000bw --check", changed=True, extra=formats)
    assert not Path(f"{session.output}-modelopt").exists()
    session.good("ansible-playbook playbooks/export.yml -i inventory/rtx6000bw", changed=True, extra=formats)
    assert len(list(Path(f"{session.output}-modelopt").glob("row_*.pt"))) == ROWS


def test_tags(session: Session) -> None:
    before, pid = session.host.signature(), session.host.production().pid
    work = {"hs_output_dir": str(session.host.folder / "never-made")}
    said = session.good(
        "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --tags patch", changed=True, extra=work
    )
    assert "TASK [backup_and_patch : Back up the engine's source and edit it]" in said
    assert "TASK [stop_server" not in said and "TASK [run_extraction" not in said
    assert session.host.production().pid == pid
    session.host.assert_back(before)
    said = session.good(
        "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --tags preflight --check", extra=work
    )
    assert "TASK [preflight : Show the plan]" in said and "TASK [backup_and_patch : Back up" not in said
    listed = session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --list-tags")
    page = (REPO / "docs/tags.md").read_text()
    for tag in ("preflight", "arm", "patch", "stop", "launch", "extract", "restore"):
        assert tag in listed and f"| `{tag}` |" in page
    assert "stop_server : Stop production" in session.good(
        "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --list-tasks"
    )
    session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --limit rtx6000bw", changed=False)
    played = session.doc(
        'ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --start-at-task "Stop production"', extra=work
    )
    assert played.code == 2, played.out
    assert session.host.production().pid == pid
    session.host.assert_back(before)


def test_a_step_without_the_one_before_refuses_and_production_is_not_touched(session: Session) -> None:
    before, pid = session.host.signature(), session.host.production().pid
    extra = {**session.extra, "hs_output_dir": str(session.host.folder / "never-made")}
    (session.host.folder / "result.json").unlink(missing_ok=True)
    played = session.host.play("extract", "--tags", "extract", extra=extra)
    assert played.code == 2, played.out
    assert "the extraction server was not launched" in " ".join(played.out.split())
    assert session.host.production().pid == pid
    session.host.assert_back(before)


def test_without_ansible(session: Session) -> None:
    session.good("/var/lib/sglang-hs/hs status")
    assert json.loads(session.good("/var/lib/sglang-hs/hs status --json"))["open"] is False
    assert "no run is open" in session.good("/var/lib/sglang-hs/hs restore --dry-run")
    session.good("/var/lib/sglang-hs/hs restore")
    session.good("PYTHONPATH=/var/lib/sglang-hs/lib python3 -m sglang_hs status --state-dir /var/lib/sglang-hs")
    session.good(
        "PYTHONPATH=/var/lib/sglang-hs/lib /opt/sglang/bin/python -m sglang_hs_client verify --output /data/hidden-states"
    )
    session.good(
        "PYTHONPATH=/var/lib/sglang-hs/lib /opt/sglang/bin/python -m sglang_hs_client export --output /data/hidden-states --format native"
    )
    session.good(
        "PYTHONPATH=/var/lib/sglang-hs/lib /opt/sglang/bin/python -m sglang_hs_client export --output /data/hidden-states"
        " --format modelopt --to /data/hidden-states-modelopt --dry-run"
    )


@pytest.mark.parametrize("name", ["layers", "without-ansible"])
def test_the_python_of_the_pages_runs(session: Session, name: str) -> None:
    code = session.replaced(docs_text.block(name))
    ending = {"layers": "print(len(manifest['slots']))", "without-ansible": "print(states.shape[0] == len(ids))"}[name]
    done = subprocess.run(
        [str(session.engine_python), "-c", f"{code}\n{ending}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == {"layers": "4", "without-ansible": "True"}[name]

"""What a server's log tells: how far the loading is, and why the server ended. The logs in data/server_logs are those of real servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_hs import ending, loading

LOGS = Path(__file__).parent / "data/server_logs"
GREW = ("starting", "loading weights", "memory pool", "warm-up", "ready")


def stages(name: str) -> list[str]:
    """What was told as the log grew, each once."""
    lines = [line for _, line in ending.read_lines(LOGS / f"{name}.log")]
    told = [str(loading.stage(lines[:end])) for end in range(1, len(lines) + 1)]
    return [stage for number, stage in enumerate(told) if number == 0 or told[number - 1] != stage]


@pytest.mark.parametrize(
    "name", ["0.4.10.post2-ready", "0.5.10.post1-tp2-ready", "0.5.14-ready", "0.5.23-tp2-scheduler-killed-serving"]
)
def test_every_release_tells_how_far_it_is(name: str) -> None:
    told = stages(name)
    assert [stage for stage in told if ":" not in stage] == list(GREW)
    weights = [stage for stage in told if ":" in stage]
    assert weights[-1] == "loading weights: 100 % (shard 1 of 1)"
    assert told.index(weights[0]) > told.index("loading weights") and told.index(weights[-1]) < told.index(
        "memory pool"
    )


@pytest.mark.parametrize(
    ("line", "shards"),
    [
        ("Loading safetensors checkpoint shards:  37% Completed | 23/62 [02:11<03:42,  5.71s/it]", (37, 23, 62)),
        ("Loading pt checkpoint shards: 100% Completed | 2/2 [00:01<00:00,  1.5it/s]", (100, 2, 2)),
        ("Multi-thread loading shards:   2% Completed | 1/64 [00:03<03:09,  3.01s/it]", (2, 1, 64)),
        ("Loading safetensors using Fastsafetensor loader:  50%|█████     | 5/10 [00:09<00:09]", (50, 5, 10)),
    ],
)
def test_the_bars_of_the_loaders(line: str, shards: tuple[int, int, int]) -> None:
    # the bars' formats are those of SGLang's model_loader/weight_utils.py
    stage = loading.stage(["Load weight begin. avail mem=93.62 GB", line])
    assert stage == ("loading weights", *shards)


def test_a_bar_that_is_rewritten_in_its_line_counts_as_it_stands_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    bars = "\r".join(
        f"Multi-thread loading shards:  {n}% Completed | {n}/100 [00:03<03:09,  3.01s/it]" for n in range(10, 43)
    )
    log.write_text("server_args=x\nLoad weight begin.\n" + bars)
    assert loading.look(log) == ("loading weights", 42, 42, 100)


def test_a_server_that_is_started_again_starts_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    once = (LOGS / "0.5.14-ready.log").read_text()
    log.write_text(once + "[2026-11-30 07:00:00] server_args=ServerArgs(model_path='/srv')\n")
    assert str(loading.look(log)) == "starting"
    assert str(loading.look(tmp_path / "none")) == "starting"


WHY = {
    "0.5.23-no-model": "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/srv/models/nothing'.",
    "0.5.23-wrong-value": "sglang serve: error: argument --dtype: invalid choice: 'float33'",
    "0.5.23-unknown-option": "sglang serve: error: unrecognized arguments: --no-such-option",
    "0.5.23-tp2-broken-weights": "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, "
    "file not fully covered (TP1, weight_utils.py:1354 in _load_file: with safetensors.safe_open(",
    "0.4.10.post2-tp2-scheduler-exception": "RuntimeError: shape mismatch: value tensor of shape [2, 1, 80] cannot be broadcast to "
    "indexing result of shape [1, 1, 80] (TP1, memory_pool.py:834 in set_kv_buffer: self.kv_buffer[",
    "0.5.23-tp2-scheduler-killed-loading": "Rank 0 scheduler died during initialization (exit code: -9): killed from outside",
    "0.5.23-tp2-scheduler-killed-serving": "one of its processes ended without a word: killed from outside (kill -9, or the kernel for "
    "want of memory: dmesg -T tells); what the others said of it: RuntimeError: [/__w/pytorch/",
    "0.5.23-tp2-not-enough-memory": "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=1e-06. Raise ",
    "0.5.23-port-taken": "ERROR:    [Errno 98] error while attempting to bind on address",
}


@pytest.mark.parametrize("name", WHY)
def test_a_dead_server_is_told_by_the_failure_that_started_it(name: str) -> None:
    assert ending.why_ended(LOGS / f"{name}.log").startswith(WHY[name])


def interleaved(*logs: str) -> str:
    """Lines of several processes, one after the other in turn: what unbuffered tracebacks look like."""
    parts = [log.splitlines() for log in logs]
    longest = max(len(part) for part in parts)
    return "\n".join(part[number] for number in range(longest) for part in parts if number < len(part)) + "\n"


TRACEBACK = (
    "[2026-01-01 10:00:00 TP{rank}] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/srv/engine/scheduler.py", line 1, in run_scheduler_process\n    scheduler = Scheduler()\n'
    '  File "/srv/engine/memory_pool.py", line 812, in _create_buffers\n    torch.zeros(size)\n    ^^^^^^^^^^^^^^^^^\n{last}\n\n'
)
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 94.97 GiB of which 1.19 GiB is free."


def test_out_of_memory_on_one_rank_is_told_and_not_what_the_others_said(tmp_path: Path) -> None:
    log = tmp_path / "log"
    own = TRACEBACK.format(rank=1, last=OUT_OF_MEMORY)
    closed = TRACEBACK.format(rank=0, last="RuntimeError: [Rank 0] Connection closed by peer [127.0.0.1]:2048")
    nccl = TRACEBACK.format(
        rank=2,
        last="torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
    )
    parent = (
        "[2026-01-01 10:00:09] Received sigquit from a child process. It usually means the child failed.\n"
        'Traceback (most recent call last):\n  File "/srv/engine/engine.py", line 2, in _wait\n    recv()\nEOFError\nKilled\n'
    )
    for text in (closed + own + nccl + parent, own + closed + parent, interleaved(own, closed, nccl) + parent):
        log.write_text("[2026-01-01 09:59:00] server_args=x\n" + text)
        assert ending.why_ended(log, 137).startswith(OUT_OF_MEMORY), text
    assert "memory_pool.py:812 in _create_buffers: torch.zeros(size)" in ending.why_ended(log)


@pytest.mark.parametrize("head", ["", "[2026-01-01 10:00:00 TP3] Scheduler hit an exception: "])
def test_a_chain_is_told_by_its_last_exception_and_a_text_in_two_lines_whole(tmp_path: Path, head: str) -> None:
    log = tmp_path / "log"
    log.write_text(
        head + "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\n    g()\nKeyError: 'x'\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "b.py", line 2, in h\n    f()\n'
        "RuntimeError: Error(s) in loading state_dict for DeepseekV2Model:\n\tsize mismatch for weight\n"
    )
    rank = "TP3, " if head else ""
    assert ending.why_ended(log) == (
        f"RuntimeError: Error(s) in loading state_dict for DeepseekV2Model: size mismatch for weight ({rank}b.py:2 in h: f())"
    )


def test_an_error_of_the_server_before_in_the_same_log_is_not_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    before = "[2026-01-01 09:00:00] server_args=x\n" + TRACEBACK.format(rank=0, last="ValueError: of last week")
    log.write_text(
        before + "[2026-01-01 10:00:00] server_args=y\n" + TRACEBACK.format(rank=0, last="ValueError: of today")
    )
    assert ending.why_ended(log).startswith("ValueError: of today")
    # who fails at his arguments never says that he was started
    over = before + "[2026-01-01 09:30:00] INFO:     Finished server process [7]\n"
    log.write_text(over + "usage: sglang serve\nsglang serve: error: argument --dtype: invalid choice: 'x'\n")
    assert ending.why_ended(log).startswith("sglang serve: error: argument --dtype")


def test_a_log_that_names_no_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert ending.why_ended(log) == "nothing was logged"
    log.write_text(
        "[2026-01-01 09:00:00] SIGTERM received. Draining requests\n[2026-01-01 09:00:01] Prefill batch, #new-seq: 1\nKilled\n"
    )
    assert ending.why_ended(log, 0) == "its log names no error, its last lines: SIGTERM received. Draining requests"
    assert ending.why_ended(log, 137).startswith(
        "it was killed from outside (kill -9, or the kernel for want of memory"
    )


def test_last_lines_say_something(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "[2026-01-01 10:00:00] \x1b[1;33mloading\x1b[0m\n  warnings.warn(\n\nTraceback (most recent call last):\n"
        '  File "x.py", line 1, in f\n    ^^^^\nRuntimeError: out of memory\n'
    )
    assert ending.last_lines(log) == ["loading", "RuntimeError: out of memory"]

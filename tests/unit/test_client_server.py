"""The client's HTTP side, its specification and its side of the dump folder: what needs no torch."""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
from sglang_hs.errors import HsError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "files" / "engine"))

from sglang_hs_client.exchange import Exchange
from sglang_hs_client.faults import SampleFault, ServerGone
from sglang_hs_client.server import Server
from sglang_hs_client.spec import parse

SPEC: Dict[str, Any] = {
    "server": "http://127.0.0.1:1",
    "dataset": "/d",
    "output_dir": "/o",
    "dump_dir": "/x",
    "boundaries": [3, 31, 59],
    "model_path": "/m",
    "hidden_size": 4,
    "vocab_size": 10,
    "max_prompt": 10,
    "run_dir": "/r",
}


class Answers:
    """A server whose answers are set by the test."""

    def __init__(self) -> None:
        self.status, self.body = 200, b"{}"
        self.seen: List[Any] = []
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answers.seen.append((self.path, json.loads(body), self.headers.get("Authorization")))
                if answers.status == 0:
                    threading.Event().wait(1.0)
                    return
                self.send_response(answers.status)
                self.send_header("Content-Length", str(len(answers.body)))
                self.end_headers()
                self.wfile.write(answers.body)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = "http://127.0.0.1:{}".format(self.http.server_address[1])


@pytest.fixture
def answers() -> Iterator[Answers]:
    made = Answers()
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_a_prompt_is_sent_as_ids_with_the_name_as_request_id(answers: Answers) -> None:
    answers.body = json.dumps({"meta_info": {"prompt_tokens": 2, "cached_tokens": 0}}).encode()
    assert Server(answers.url, "secret", 5).generate([1, 2], "name-1")["prompt_tokens"] == 2
    path, body, key = answers.seen[0]
    assert (path, key) == ("/generate", "Bearer secret")
    assert body["input_ids"] == [1, 2] and body["rid"] == "name-1" and body["sampling_params"]["max_new_tokens"] == 1
    assert "return_logprob" not in body


@pytest.mark.parametrize(
    ("status", "body", "told", "fatal"),
    [
        (200, {"meta_info": {"prompt_tokens": 1}}, "took 1 of 2 tokens", True),
        (200, {"meta_info": {"prompt_tokens": 2, "cached_tokens": 1}}, "prefix cache", True),
        (
            200,
            {"meta_info": {"prompt_tokens": 2, "finish_reason": {"type": "abort", "message": "out of memory"}}},
            "out of memory",
            False,
        ),
        (200, {"text": ""}, "no meta_info", False),
        (200, "{oops", "not JSON", False),
        (500, {"error": "no"}, "answered 500", False),
        (503, "", "answered 503", False),
        (400, {"error": "too long"}, "too long", True),
        (401, {"error": "key"}, "answered 401", True),
    ],
)
def test_bad_answers_are_told(answers: Answers, status: int, body: Any, told: str, fatal: bool) -> None:
    answers.status = status
    answers.body = (body if isinstance(body, str) else json.dumps(body)).encode()
    with pytest.raises(SampleFault) as caught:
        Server(answers.url, None, 5).generate([1, 2], "n")
    assert told in caught.value.reason and caught.value.fatal is fatal


def test_a_hanging_server_is_a_fault_of_the_sample_a_missing_one_is_not(answers: Answers) -> None:
    answers.status = 0
    with pytest.raises(SampleFault, match=r"no answer from the server within 0.2 s"):
        Server(answers.url, None, 0.2).generate([1, 2], "n")
    with pytest.raises(ServerGone, match="not reachable"):
        Server("http://127.0.0.1:1", None, 5).generate([1, 2], "n")


def test_a_specification_has_defaults_and_hides_the_key() -> None:
    spec = parse(dict(SPEC, api_key="secret"))
    assert (spec.final, spec.in_flight, spec.states, spec.canary.positions) == ("pre_norm", 4, 4, 64)
    assert "secret" not in repr(spec)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"surprise": 1}, "surprise"),
        ({"boundaries": [3, 2]}, "boundaries must rise"),
        ({"boundaries": "3"}, "boundaries must be a list"),
        ({"boundaries": []}, "boundaries"),
        ({"final": "normed"}, "final must be one of"),
        ({"in_flight": 0}, "in_flight"),
        ({"retries": -1}, "retries"),
        ({"vocab_size": "10"}, "vocab_size has the wrong type"),
        ({"cut_to": 0}, "cut_to"),
        ({"server": "localhost:1"}, "server must be a URL"),
        ({"canary": {"sequences": 0}}, "canary.sequences"),
        ({"canary": {"bird": 1}}, "bird"),
        ({"canary": 3}, "canary must be an object"),
        ({"provenance": []}, "provenance"),
    ],
)
def test_a_wrong_specification_names_the_key(change: Dict[str, Any], told: str) -> None:
    with pytest.raises(HsError, match="specification is wrong") as caught:
        parse(dict(SPEC, **change))
    assert told in caught.value.what


def test_a_missing_key_is_named() -> None:
    with pytest.raises(HsError, match="dataset"):
        parse({key: value for key, value in SPEC.items() if key != "dataset"})


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    for name in ("attached", "want", "done", "used", "failed"):
        (tmp_path / name).mkdir()
    return tmp_path


def attach(dump: Path, rank: int, **more: Any) -> None:
    entry = dict({"rank": rank, "tp_size": 2, "boundaries": [3, 31, 59], "final": "pre_norm", "hidden_size": 4}, **more)
    (dump / "attached" / "rank{}.json".format(rank)).write_text(json.dumps(entry))


def test_a_folder_without_a_capture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HsError, match="not the dump folder of a capture"):
        Exchange(tmp_path).open()


def test_every_rank_must_report_and_agree(dump: Path) -> None:
    exchange, spec = Exchange(dump), parse(SPEC)
    with pytest.raises(HsError, match=r"0 of \? ranks report"):
        exchange.check(spec)
    attach(dump, 0)
    with pytest.raises(HsError, match="1 of 2 ranks report"):
        exchange.check(spec)
    attach(dump, 1, boundaries=[2, 30, 58])
    with pytest.raises(HsError, match=r"rank 1 was set up otherwise \(boundaries"):
        exchange.check(spec)
    attach(dump, 1)
    assert exchange.check(spec)["rank"] == 0
    (dump / "attached" / "refused-rank1.json").write_text('{"reason": "pipeline parallelism"}')
    with pytest.raises(HsError, match="pipeline parallelism"):
        exchange.check(spec)


def test_one_client_at_a_time_and_leftovers_go(dump: Path) -> None:
    for name in ("want/a", "done/a.safetensors", "failed/a.json", "every_rank"):
        (dump / name).touch()
    first, second = Exchange(dump), Exchange(dump)
    first.open()
    assert [os.listdir(str(dump / name)) for name in ("want", "done", "used", "failed")] == [[], [], [], []]
    assert not (dump / "every_rank").exists()
    with pytest.raises(HsError, match="another client is at work"):
        second.open()
    first.close()
    second.open()
    second.close()


def test_waiting_ends_with_the_dump_or_a_reason(dump: Path) -> None:
    exchange = Exchange(dump)
    exchange.wish("a" * 64)
    assert (dump / "want" / ("a" * 64)).read_text() == ""
    with pytest.raises(SampleFault, match=r"no dump came within 0.05 s"):
        exchange.wait("a" * 64, 0.05)
    (dump / "failed" / "unnamed.json").write_text('{"reason": "a prefix cache hit"}')
    with pytest.raises(SampleFault, match="a prefix cache hit"):
        exchange.wait("a" * 64, 0.05)
    (dump / "failed" / ("a" * 64 + ".json")).write_text('{"reason": "no space left"}')
    with pytest.raises(SampleFault, match="no space left"):
        exchange.wait("a" * 64, 5)
    exchange.wish("a" * 64, every_rank=True)  # a new wish forgets the old reason
    assert (dump / "want" / ("a" * 64)).read_text() == "ranks"
    path = dump / "done" / ("a" * 64 + ".safetensors")
    path.touch()
    assert exchange.wait("a" * 64, 5) == path
    exchange.forget("a" * 64)
    assert os.listdir(str(dump / "want")) == os.listdir(str(dump / "done")) == []
    path.touch()
    exchange.hand_back("a" * 64)
    exchange.hand_back("a" * 64)  # one that was moved, not copied, is not there any more
    assert os.listdir(str(dump / "done")) == [] and os.listdir(str(dump / "used")) == ["a" * 64 + ".safetensors"]

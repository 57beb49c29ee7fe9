"""The server's HTTP side: one blocking connection per worker thread, standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import threading
import urllib.parse
from typing import Any, Dict, List, Optional

from .faults import SampleFault, ServerGone


class Server:
    """``base``: URL of the server. timeout: seconds for one request. Each thread keeps its own connection."""

    def __init__(self, base: str, api_key: Optional[str], timeout: float) -> None:
        parts = urllib.parse.urlsplit(base)
        self.tls = parts.scheme == "https"
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or (443 if self.tls else 80)
        self.path = parts.path.rstrip("/")
        self.timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = "Bearer " + api_key
        self._own = threading.local()

    def generate(self, ids: List[int], rid: str, logprobs: int = 0) -> Dict[str, Any]:
        """Run the prompt ``ids`` for one new token; with ``logprobs`` also the top log-probabilities at every prompt position.

        Returns the answer's meta_info. SampleFault: the server refused, failed or took too long. ServerGone: it is not there.
        """
        body: Dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "rid": rid,
        }
        if logprobs:
            body.update(return_logprob=True, logprob_start_len=0, top_logprobs_num=logprobs)
        answer = self._post("/generate", body, self.timeout)
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(meta, dict):
            raise SampleFault("the server's answer has no meta_info: {}".format(_short(json.dumps(answer))))
        finish = meta.get("finish_reason")
        if isinstance(finish, dict) and finish.get("type") == "abort":
            raise SampleFault("the server aborted the request: {}".format(_short(str(finish.get("message")))))
        taken = meta.get("prompt_tokens")
        if taken != len(ids):
            raise SampleFault(
                "the server took {} of {} tokens: it cut the prompt (context length, auto-truncate?)".format(
                    taken, len(ids)
                ),
                fatal=True,
            )
        if meta.get("cached_tokens"):
            raise SampleFault(
                "{} tokens came out of the prefix cache and were not computed; start the server with --disable-radix-cache".format(
                    meta["cached_tokens"]
                ),
                fatal=True,
            )
        return meta

    def abort(self, rid: str) -> None:
        """Ask the server to forget a request that took too long; what comes of it does not matter."""
        with contextlib.suppress(SampleFault, ServerGone):
            self._post("/abort_request", {"rid": rid}, 10.0)

    def _post(self, path: str, body: Any, timeout: float) -> Any:
        payload = json.dumps(body).encode()
        try:
            connection = self._connection(timeout)
            connection.request("POST", self.path + path, payload, self._headers)
            response = connection.getresponse()
            status, text = response.status, response.read()
        except TimeoutError as error:
            self._drop()
            raise SampleFault("no answer from the server within {:g} s".format(timeout)) from error
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            raise ServerGone(
                "the server at {}:{} is not reachable: {}".format(self.host, self.port, error or type(error).__name__)
            ) from error
        if status != 200:
            message = "the server answered {}: {}".format(status, _short(text.decode(errors="replace")))
            raise SampleFault(message, fatal=status in (400, 401, 403, 404, 413, 422))
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise SampleFault(
                "the server's answer is not JSON: {}".format(_short(text.decode(errors="replace")))
            ) from error

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        """A fresh connection per request: a kept one that the server closed meanwhile looks like a dead server."""
        self._drop()
        if self.tls:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self.host, self.port, timeout=timeout, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        self._own.connection = connection
        return connection

    def _drop(self) -> None:
        connection = getattr(self._own, "connection", None)
        if connection is not None:
            connection.close()
            self._own.connection = None


def _short(text: str) -> str:
    return text if len(text) <= 300 else text[:297] + "..."

"""What we ask an SGLang server over HTTP: a real generation, and what it says of itself.

``/health`` answers 200 with an empty body even when the scheduler is dead (sglang#6624), so only tokens that came back count.
"""

from __future__ import annotations

import json
import time
from typing import Any, Dict, List, Optional

from .errors import HsError

# Three short prompts; ids this low exist in every vocabulary.
PROMPTS = ([5, 6, 7], [11, 12, 13, 14], [21, 22, 23, 24, 25])


def ask(url: str, body: Optional[Dict[str, Any]] = None, api_key: str = "", timeout: float = 30.0) -> Any:
    """GET ``url``, or POST ``body`` as JSON; the parsed answer. Proxies of the environment are not for loopback."""
    import urllib.request  # not at every start of a module that asks nobody: it brings half of the standard library

    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = "Bearer " + api_key
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def generate(url: str, api_key: str = "", timeout: float = 30.0) -> float:
    """Several real generations, each checked for tokens that came back; decoded tokens per second of the last.

    Raises HsError with what the server answered.
    """
    import urllib.error

    rate = 0.0
    for prompt in PROMPTS:
        begin = time.monotonic()
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
        try:
            answer = ask(url + "/generate", body, api_key, timeout)
        except urllib.error.HTTPError as error:
            raise HsError(
                "{}/generate answered {}: {}".format(
                    url, error.code, " ".join(error.read()[:300].decode(errors="replace").split())
                )
            ) from error
        except (OSError, ValueError) as error:
            raise HsError("{}/generate does not answer: {}".format(url, getattr(error, "reason", error))) from error
        tokens = _completion_tokens(answer)
        if tokens < 1:
            raise HsError("{}/generate answered without a token: {}".format(url, json.dumps(answer)[:300]))
        rate = tokens / max(time.monotonic() - begin, 1e-9)
    return rate


def decode_rate(url: str, api_key: str = "", tokens: int = 64, timeout: float = 120.0) -> Optional[float]:
    """Tokens per second that one request is decoded with, the better of two; None when the server does not answer.

    Measured as the users of an idle server see it; whoever else asks meanwhile lowers it.
    """
    best = None
    body = {
        "input_ids": PROMPTS[-1],
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }
    for _ in range(2):
        begin = time.monotonic()
        try:
            count = _completion_tokens(ask(url + "/generate", body, api_key, timeout))
        except (OSError, ValueError):
            return None
        rate = count / max(time.monotonic() - begin, 1e-9)
        best = rate if best is None else max(best, rate)
    return best


def _completion_tokens(answer: Any) -> int:
    """Tokens in an answer of /generate."""
    if not isinstance(answer, dict):
        return 0
    return int((answer.get("meta_info") or {}).get("completion_tokens") or len(answer.get("output_ids") or []))


def server_info(url: str, api_key: str = "", timeout: float = 10.0) -> Dict[str, Any]:
    """What the server says of its arguments and limits; the endpoint has been renamed, so both names are tried."""
    for path in ("/server_info", "/get_server_info"):
        try:
            answer = ask(url + path, None, api_key, timeout)
        except (OSError, ValueError):
            continue
        if isinstance(answer, dict):
            return answer
    return {}


def healthy(url: str, api_key: str = "", timeout: float = 30.0) -> Optional[str]:
    """None when the server generates, else why not."""
    try:
        generate(url, api_key, timeout)
    except HsError as error:
        return error.what
    return None


def wait_healthy(url: str, api_key: str, patience: float, still_there: Any = lambda: None) -> List[str]:
    """Wait until the server generates. Returns [] or the reasons why it does not; ``still_there()`` may end the wait with one."""
    until = time.monotonic() + patience
    reason = None
    while True:
        reason = healthy(url, api_key)
        if reason is None:
            return []
        gone = still_there()
        if gone:
            return [gone]
        if time.monotonic() > until:
            return ["no generation within {:.0f} s: {}".format(patience, reason)]
        time.sleep(0.2)

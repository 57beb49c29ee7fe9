"""Keys and tokens are hidden in what is written down; what only looks like one is not."""

from __future__ import annotations

import pytest
from sglang_hs import secrets


@pytest.mark.parametrize("name", ["--api-key", "--admin-api-key", "--ssl-keyfile-password", "--hf-token"])
def test_secret_options_are_hidden(name: str) -> None:
    assert secrets.command_line(["python", name, "abc", "--port", "1"]) == ["python", name, "(hidden)", "--port", "1"]
    assert secrets.command_line([name + "=abc"]) == [name + "=(hidden)"]
    assert secrets.command_line([name]) == [name]


@pytest.mark.parametrize(
    "words",
    [
        ["--max-prefill-tokens", "4096"],
        ["--max-total-tokens", "16384"],
        ["--tokenizer-path", "/models/kimi"],
        ["--skip-tokenizer-init"],
        ["--speculative-num-draft-tokens", "4"],
        ["--tokenizer-worker-num", "2"],
        ["--log-requests-level", "2"],
    ],
)
def test_other_options_are_shown(words: list[str]) -> None:
    assert secrets.command_line(words) == words


def test_secret_variables_are_hidden() -> None:
    given = {
        "HF_TOKEN": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "WANDB_API_KEY": "c",
        "DB_PASSWORD": "d",
        "NCCL_PROTO": "LL",
        "KEYMAP": "de",
        "MONKEY": "x",
    }
    hidden = [name for name, value in secrets.environment(given).items() if value == "(hidden)"]
    assert hidden == ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "DB_PASSWORD"]

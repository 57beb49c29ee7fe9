"""What a failed check shows, and what the checks share."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest
from testinfra.host import Host  # type: ignore[import-untyped]

JOURNAL = "journalctl --no-pager --lines=150 --output=short-iso --unit=sglang.service --unit='sglang-hs-*'"
UNITS = "systemctl list-units --all --plain --no-legend 'sglang*'"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the host's units and journal under a failed check."""
    report = yield
    host = getattr(item, "funcargs", {}).get("host")
    if report.failed and host is not None:
        for title, command in (("units", UNITS), ("journal", JOURNAL)):
            try:
                words = host.run(command).stdout
            except Exception as error:  # the check's own failure is what matters
                words = f"not to be had: {error}"
            report.sections.append((f"{title} on {host.backend.hostname}", words))
    return report


@pytest.fixture
def record(host: Host) -> dict[str, Any]:
    """Give what prepare wrote down on the host."""
    found: dict[str, Any] = json.loads(host.file("/etc/hs-verify.json").content_string)
    return found

"""The hosts of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_host import FORMATS, Host, end_host, make_host


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Tensor parallel 1. Started many times, so by fork; the other hosts, molecule and the demo start their servers as production does."""
    host = make_host(tmp_path_factory.mktemp("host"), 1, fork="1")
    yield host
    end_host(host)


@pytest.fixture(scope="module")
def host_tp2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Tensor parallel 2, over gloo."""
    host = make_host(tmp_path_factory.mktemp("host_tp2"), 2)
    yield host
    end_host(host)


@pytest.fixture(scope="module")
def finished(host: Host) -> Path:
    """The output of a real run for every format: the one that test_2 keeps, or one made here."""
    if not host.finished.is_dir():
        played = host.play("extract", extra={"hs_formats": FORMATS, "hs_output_dir": str(host.finished)})
        assert played.code == 0, played.out
        host.keep_page()
    return host.finished

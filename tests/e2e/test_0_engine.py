"""What runs inside the engine's own Python: capture and client against real torch modules, run by the engine's interpreter."""

from __future__ import annotations

from local_host import Host, run_in_the_engines_python


def test_the_capture_and_the_client_in_the_engines_python(host: Host) -> None:
    run_in_the_engines_python(host, "tests/engine", 900)

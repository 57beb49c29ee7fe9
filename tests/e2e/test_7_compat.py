"""The edit on changed real sources of other releases, run by the releases' own code (compat/), in the engine's Python."""

from __future__ import annotations

from local_host import Host, run_in_the_engines_python


def test_changed_sources_are_edited_right_or_refused(host: Host) -> None:
    run_in_the_engines_python(host, "tests/compat", 600)

"""The catalogue over eight hosts of 125,000 finished samples each: read what was taken of each, compare, merge, write a line of JSON a sample.

*Merge* is what the last play of extract.yml does on the controller, with a twentieth of the samples finished by two hosts. *Divide* is the first play's
part there, with nothing finished: a million samples among eight hosts, each share written.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from bench.frame import Figure, Goal, Place, seconds

PYTHON = "controller"
ORDER = 150
HOSTS, ROWS = 8, 125_000
REPEATS = 3


def run(place: Place) -> Iterator[Figure]:
    """Both, with catalogues as hosts send them."""
    import hashlib
    import random
    from array import array

    from sglang_hs.catalogue import Catalogue
    from sglang_hs.fleet import Fleet, key_of, write
    from sglang_hs.share import Index

    chance = random.Random(1)
    whole = HOSTS * ROWS
    lengths = array("I", (min(int(chance.lognormvariate(7.3, 0.9)) + 1, 16384) for _ in range(whole)))
    sha256 = "ab" * 32
    index = Index(sha256, lengths, None, 16384)
    identity = {"dataset_sha256": sha256, "cut_to": None, "boundaries": [3, 31, 59], "final": "pre_norm"}
    fleet = Fleet(str(place.disk / "fleet"))
    write(fleet.folder / key_of(identity) / "index", index.pack())
    names = [f"host{number}" for number in range(HOSTS)]
    for number, name in enumerate(names):
        # the first rows of the next host's part too
        mine = sorted({(number * ROWS + step) % whole for step in range(ROWS + ROWS // 20)})
        found = Catalogue(
            name,
            identity,
            "/data/hidden-states",
            array("I", mine),
            array("I", (lengths[idx] for idx in mine)),
            array("Q", (lengths[idx] * 57352 for idx in mine)),
            b"".join(hashlib.sha256(b"%d" % idx).digest() for idx in mine),
        )
        fleet.keep_now(name, found.pack())
    told = fleet.merge(names)
    if (told["samples"], told["twice"], told["complete"]) != (whole, whole // 20, True):
        raise RuntimeError(f"merged {told['samples']} samples, {told['twice']} of them twice")
    took = [seconds(lambda: fleet.merge(names)) for _ in range(REPEATS)]
    size = (fleet.folder / "now/host0.txt").stat().st_size / 1e6
    yield place.absolute(
        "merge_catalogues", "s", took, Goal("at most", 10.0), note=f"a host's catalogue is {size:.1f} MB on its way"
    )
    shutil.rmtree(fleet.folder / "now")
    for name in names:
        empty = Catalogue(name, dict(identity, final="both"), "", array("I"), array("I"), array("Q"), b"")
        fleet.keep_now(name, empty.pack())
    took = [seconds(lambda: fleet.divide(index, dict.fromkeys(names, 1.0))) for _ in range(REPEATS)]
    yield place.absolute("merge_catalogues, divide", "s", took, Goal("at most", 20.0))

"""What the book of a million finished samples takes on the disk, per sample (`manifest.sqlite`: number, name, length, state, file, size, sha256).

The real book, filled as the client fills it: all rows entered, then each one done.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.frame import Figure, Goal, Place

PYTHON = "controller"
ORDER = 100
ROWS = 1_000_000
LIMIT = """
Text, so that a person can ask the book with `sqlite3`: of each sample 64 characters of its name, once in the row and once in the index that finds equal
sequences, 64 of its sha256 and 34 of its path are 226 bytes by themselves; pages that are three quarters to nine tenths full, as SQLite leaves them,
take the rest.
Against the 100 MB of a sample it is nothing, so it was left.
"""


def run(place: Place) -> Iterator[Figure]:
    """One book."""
    import hashlib

    from sglang_hs.manifest import FILE, Manifest

    folder = place.disk / "book"
    folder.mkdir()
    book = Manifest(folder, lag=3600)
    for idx in range(ROWS):
        book.add([(idx, hashlib.sha256(b"%d" % idx).hexdigest(), 2353, None)])
    for idx in range(ROWS):
        sha256 = hashlib.sha256(b"file %d" % idx).hexdigest()
        book.done(idx, f"hidden_states/hs_{idx}.safetensors", 134_930_432, sha256)
    book.close()
    size = sum(path.stat().st_size for path in folder.glob(FILE + "*")) / ROWS
    yield place.absolute("book_size", "bytes", [size], Goal("at most", 300), "a sample", note=f"{ROWS:,} samples")

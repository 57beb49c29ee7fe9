"""What lies in an export's folder, and from what it was made: a row with both checksums for each file."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional

from sglang_hs.errors import HsError

FILE = "export.sqlite"


class Entry(NamedTuple):
    """source: sha256 of the captured file. bytes, sha256: of the exported one."""

    source: str
    bytes: int
    sha256: str


class Ledger:
    """The book of ``folder``. ``claim`` says whose export it is; a folder with files and no book is refused."""

    def __init__(self, folder: Path, claim: Dict[str, Any], read_only: bool = False) -> None:
        self._db: Optional[sqlite3.Connection] = None
        path = folder / FILE
        if not path.is_file():
            strangers = (
                sorted(entry.name for entry in folder.iterdir() if entry.name != ".lock")[:3] if folder.is_dir() else []
            )
            if strangers:
                raise HsError(
                    "{} holds files that are not ours: {}".format(folder, ", ".join(strangers)),
                    "everything",
                    "export into a folder of its own",
                )
            if read_only:
                return
        try:
            where = "{}?mode={}".format(path.absolute().as_uri(), "ro" if read_only else "rwc")
            self._db = sqlite3.connect(where, uri=True, isolation_level=None, timeout=30)
            if not read_only:
                self._db.execute("PRAGMA journal_mode = DELETE")
                self._db.execute("CREATE TABLE IF NOT EXISTS claim (what TEXT NOT NULL)")
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, source TEXT NOT NULL, bytes INTEGER NOT NULL, sha256 TEXT NOT NULL)"
                )
            known = self._db.execute("SELECT what FROM claim").fetchone()
            if known is None and not read_only:
                self._db.execute("INSERT INTO claim VALUES (?)", (json.dumps(claim, sort_keys=True),))
        except sqlite3.DatabaseError as error:
            raise HsError(
                "{} cannot be opened: {}".format(path, error), "everything", "export into another folder"
            ) from error
        if known is not None and json.loads(known[0]) != json.loads(json.dumps(claim)):
            theirs = json.loads(known[0])
            told = "; ".join(
                "{}: the folder has {}, this export {}".format(key, theirs.get(key), claim.get(key))
                for key in sorted(set(theirs) | set(claim))
                if theirs.get(key) != claim.get(key)
            )
            self.close()
            raise HsError(
                "{} belongs to another export ({})".format(folder, told), "everything", "export into another folder"
            )

    def entry(self, path: str) -> Optional[Entry]:
        """What is known of a file, None where nothing is."""
        if self._db is None:
            return None
        found = self._db.execute("SELECT source, bytes, sha256 FROM files WHERE path = ?", (path,)).fetchone()
        return Entry(*found) if found else None

    def enter(self, path: str, entry: Entry) -> None:
        """The file is in its final place."""
        assert self._db is not None
        self._db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", (path, *entry))

    def close(self) -> None:
        """Close the book."""
        if self._db is not None:
            self._db.close()
            self._db = None

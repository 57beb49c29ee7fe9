"""A data set's lengths, and a host's share of them: what the controller divides, and what it gives to each host.

Indices are the data set's row numbers everywhere. A share holds what a host has finished already and what it is to do.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Mapping, Optional

from . import packed


@dataclass(frozen=True)
class Index:
    """A data set as the controller needs it. sha256: of its bytes; lengths: tokens of each row after the cut, 0 of a bad row.

    cut_to, max_prompt: the limits it was read with, in tokens. bad: the first faults.
    """

    sha256: str
    lengths: "array[int]"
    cut_to: Optional[int] = None
    max_prompt: int = 0
    bad: List[str] = field(default_factory=list)

    @property
    def bad_total(self) -> int:
        """Rows that are no valid samples."""
        return self.lengths.count(0)

    def pack(self) -> str:
        """As one line of text."""
        header = {"sha256": self.sha256, "cut_to": self.cut_to, "max_prompt": self.max_prompt, "bad": self.bad}
        return packed.pack(header, {"lengths": packed.column(self.lengths)})

    @classmethod
    def unpack(cls, text: str) -> "Index":
        """The opposite. Raises HsError."""
        header, columns = packed.unpack(text, "the data set's index")
        return cls(lengths=packed.numbers(columns["lengths"], 4), **header)


@dataclass(frozen=True)
class Share:
    """A host's part. rows: of the whole data set; indices ascending, lengths in tokens beside them.

    only: sha256 of the file that holds these rows and no others, in this order; empty: the file is the whole data set.
    owned: finished samples that the catalogue over all hosts gives to this one.
    """

    host: str
    sha256: str
    rows: int
    indices: "array[int]"
    lengths: "array[int]"
    only: str = ""
    owned: int = 0

    def pack(self) -> str:
        """As one line of text."""
        header: Dict[str, Any] = {"host": self.host, "sha256": self.sha256, "rows": self.rows, "only": self.only}
        header["owned"] = self.owned
        return packed.pack(header, {"indices": packed.column(self.indices), "lengths": packed.column(self.lengths)})

    @classmethod
    def unpack(cls, text: str) -> "Share":
        """The opposite. Raises HsError."""
        header, columns = packed.unpack(text, "the host's share")
        return cls(
            indices=packed.numbers(columns["indices"], 4), lengths=packed.numbers(columns["lengths"], 4), **header
        )

    @classmethod
    def of(cls, host: str, index: Index, indices: Iterable[int], only: str = "") -> "Share":
        """Rows ``indices`` of the data set."""
        chosen = array("I", sorted(indices))
        lengths = array("I", (index.lengths[one] for one in chosen))
        return cls(host, index.sha256, len(index.lengths), chosen, lengths, only)

    @property
    def tokens(self) -> int:
        """Of all its rows."""
        return sum(self.lengths)

    def facts(self) -> Mapping[str, int]:
        """{samples, tokens}."""
        return {"samples": len(self.indices), "tokens": self.tokens}

"""Columns of numbers as one line of text: what goes between hosts and controller about a million samples, in a module's arguments and answer.

A header (JSON types) and named columns of bytes, compressed, as base64. Numbers in a column are little-endian.
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from array import array
from typing import Any, Dict, Mapping, Tuple

from .errors import HsError

KINDS = {4: "I", 8: "Q"}  # bytes of a number -> its array type


def pack(header: Mapping[str, Any], columns: Mapping[str, bytes]) -> str:
    """One line of text; :func:`unpack` gives both back."""
    sizes = {name: len(columns[name]) for name in sorted(columns)}
    head = json.dumps({"header": dict(header), "columns": sizes}, sort_keys=True).encode()
    body = head + b"\n" + b"".join(bytes(columns[name]) for name in sorted(columns))
    return base64.b64encode(zlib.compress(body, 1)).decode()


def unpack(text: str, what: str = "the text") -> Tuple[Dict[str, Any], Dict[str, bytes]]:
    """(header, columns). Raises HsError that names ``what`` where it is not whole."""
    try:
        head, _, body = zlib.decompress(base64.b64decode(text, validate=True)).partition(b"\n")
        document = json.loads(head)
        columns, at = {}, 0
        for name in sorted(document["columns"]):
            size = document["columns"][name]
            columns[name] = body[at : at + size]
            at += size
        if at != len(body):
            raise ValueError("it is cut")
        return document["header"], columns
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise HsError(
            "{} cannot be read: {!r}".format(what, error),
            "everything: it was only read",
            "remove it and start again: it is made anew",
        ) from error


def numbers(column: bytes, width: int) -> "array[int]":
    """The numbers of a column, ``width`` bytes each."""
    found = array(KINDS[width])
    found.frombytes(column)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def column(values: "array[int]") -> bytes:
    """An array's bytes, as a column has them."""
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()

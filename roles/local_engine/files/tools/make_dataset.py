"""Write the tiny data set that the local extraction runs over.

JSON lines of `{"input_ids": [...], "loss_mask": [...]}`. The lengths are spread evenly on a logarithmic scale from the
shortest to the longest, both included, and shuffled; the ids lie inside the model's vocabulary and are no special
tokens (a media placeholder without a picture is an error to a multimodal engine). The mask is 0 over the first
part of each sequence (the prompt) and 1 over the rest. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path


def plain_ids(model: Path) -> list[int]:
    """Return the ids of the model's vocabulary that are no special tokens, ascending."""
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    return sorted(set(tokenizer["model"]["vocab"].values()) - special)


def make_rows(ids: list[int], count: int, shortest: int, longest: int, seed: int) -> list[dict[str, list[int]]]:
    """Return the rows.

    Args:
        ids: token ids to draw from.
        count: number of sequences, at least 2.
        shortest: length of the shortest sequence, in tokens.
        longest: length of the longest sequence, in tokens.
        seed: of the shuffle, the ids and the masks.
    """
    draw = random.Random(seed)
    ratio = longest / shortest
    lengths = [round(shortest * ratio ** (index / (count - 1))) for index in range(count)]
    draw.shuffle(lengths)
    rows = []
    for length in lengths:
        prompt = int(length * (0.2 + 0.4 * draw.random()))
        rows.append(
            {
                "input_ids": [ids[int(draw.random() * len(ids))] for _ in range(length)],
                "loss_mask": [0] * prompt + [1] * (length - prompt),
            }
        )
    return rows


def main() -> int:
    """Write the file unless it already holds these bytes; print `changed` or `unchanged`."""
    parser = argparse.ArgumentParser(description="Write the tiny data set of the local engine.")
    parser.add_argument("file", type=Path, help="JSON lines file to write")
    parser.add_argument("--model", type=Path, required=True, help="model folder, for its vocabulary")
    parser.add_argument("--count", type=int, default=64, help="sequences")
    parser.add_argument("--shortest", type=int, default=16, help="tokens")
    parser.add_argument("--longest", type=int, default=1024, help="tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="say what would happen, write nothing")
    args = parser.parse_args()

    rows = make_rows(plain_ids(args.model), args.count, args.shortest, args.longest, args.seed)
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if args.file.is_file() and args.file.read_bytes() == content:
        print("unchanged")
        return 0
    if not args.check:
        new = args.file.with_name(f".{args.file.name}.new")
        new.write_bytes(content)
        new.chmod(0o644)
        os.replace(new, args.file)
    print("changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

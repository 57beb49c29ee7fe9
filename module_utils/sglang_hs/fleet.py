"""One data set over several hosts, as the controller sees it: who has finished what, who is to do the rest. Everything here is on the controller.

    FOLDER/index-*.txt            a data set's lengths, once read
    FOLDER/KEY/index              those that it was divided by last
    FOLDER/now/HOST.txt           a host's catalogue as it was just taken
    FOLDER/KEY/HOST.txt           the same, kept: a host that is lost later has not lost what it had finished
    FOLDER/KEY/HOST.forgotten     what was kept of a host, and counts no more (hs_fleet_forget)
    FOLDER/KEY/share/HOST.txt     a host's share; .jsonl: its rows, where only they are sent
    FOLDER/KEY/plan/HOST.txt      the share of a division that was only looked at: a run's is read when its host leaves, hours later
    FOLDER/KEY/catalogue.jsonl    all hosts' samples; catalogue.json: what they are

KEY names the data set with its boundaries, final state and cut.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Set, Tuple

from . import catalogue, dataset, fsio
from .catalogue import Catalogue, Merged
from .division import divide
from .errors import HsError
from .share import Index, Share


def safe(name: str) -> str:
    """A host's name as a file name; two hosts never have the same."""
    plain = re.sub(r"[^\w.+-]", "_", name)
    return plain if plain == name else "{}-{}".format(plain, hashlib.sha256(name.encode()).hexdigest()[:8])


def write(path: Path, text: str) -> None:
    """Whole or not at all, also after a power cut: what is kept of a lost host is nowhere else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fsio.write_text(path, text, 0o644)


def key_of(identity: Mapping[str, Any]) -> str:
    """Name of a data set's folder."""
    words = [identity.get(key) for key in ("dataset_sha256", "cut_to", "boundaries", "final")]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


def index_name(sha256: str, cut_to: Any, max_prompt: int, vocab_size: int) -> str:
    """File of an index: the same data set under other limits is another one."""
    return "index-{}-{}-{}-{}.txt".format(sha256[:24], cut_to or 0, max_prompt, vocab_size)


def make_index(path: str, vocab_size: int, max_prompt: int, cut_to: Any) -> Index:
    """Read the data set once. Raises HsError where it cannot be read."""
    lengths = array("I")
    found = dataset.scan(path, vocab_size, max_prompt, cut_to, lengths=lengths)
    return Index(found.sha256, lengths, cut_to, max_prompt, [str(bad) for bad in found.bad[:5]])


def indexed(path: str, settings: Mapping[str, Any], known: Iterable[str]) -> Dict[str, Any]:
    """{sha256, name} of a data set's index under a run's limits, and as ``index`` all of it, packed, unless its name is ``known``. Raises HsError."""
    cut_to, most, vocab = settings["cut_to"], int(settings["max_prompt"]), int(settings["model"]["vocab_size"])
    sha256 = dataset.digest(path)
    name = index_name(sha256, cut_to, most, vocab)
    if name in known:
        return {"sha256": sha256, "name": name}
    index = make_index(path, vocab, most, cut_to)
    # of the bytes that were read, should it have changed since
    return {"sha256": index.sha256, "name": index_name(index.sha256, cut_to, most, vocab), "index": index.pack()}


class Fleet:
    """The folder on the controller."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def keep_now(self, host: str, text: str) -> None:
        """A host's catalogue, just taken."""
        write(self.folder / "now" / (safe(host) + ".txt"), text)

    def present(self, hosts: Iterable[str]) -> List[Catalogue]:
        """What was just taken of these hosts."""
        return [self._read(self.folder / "now" / (safe(host) + ".txt")) for host in sorted(hosts)]

    def kept(self, key: str, but: Iterable[str]) -> List[Catalogue]:
        """What is kept of other hosts than ``but``."""
        without = {safe(host) + ".txt" for host in but}
        return [self._read(path) for path in sorted((self.folder / key).glob("*.txt")) if path.name not in without]

    def forget(self, key: str, hosts: Sequence[str], for_good: bool = False) -> None:
        """See that something is kept of these hosts, or was; ``for_good``: set it aside. Raises HsError for a host of which nothing is known."""
        kept = [self.folder / key / (safe(host) + ".txt") for host in hosts]
        for host, path in zip(hosts, kept):
            if not (path.is_file() or path.with_suffix(".forgotten").is_file()):
                raise HsError(
                    "nothing is kept of {} for this data set".format(host),
                    "everything: nothing was divided",
                    "take it out of hs_fleet_forget",
                )
        for path in kept:
            if for_good and path.is_file():
                os.replace(str(path), str(path.with_suffix(".forgotten")))

    def keep(self, key: str, catalogues: Iterable[Catalogue]) -> None:
        """What was just taken of these hosts is what is kept of them."""
        for one in catalogues:
            name = safe(one.host) + ".txt"
            write(self.folder / key / name, (self.folder / "now" / name).read_text(encoding="utf-8"))

    @staticmethod
    def _read(path: Path) -> Catalogue:
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise HsError(
                "there is no catalogue at {}".format(path), "everything", "run the playbook from its beginning"
            ) from error
        return Catalogue.unpack(text, str(path))

    def divide(
        self,
        index: Index,
        shares: Mapping[str, float],
        forget: Sequence[str] = (),
        skip_bad_rows: bool = False,
        source: str = "",
        plan: bool = False,
    ) -> Dict[str, Any]:
        """Give each host of ``shares`` (name -> its weight) its part of what nobody has finished.

        ``forget``: hosts whose kept samples do not count; they are forgotten for good by :meth:`merge`, as a plan divides too.
        ``source``: the data set on the controller, where hosts are to be sent their rows. ``plan``: for nobody to extract by.
        Returns {parts: host -> {share (file), samples, tokens, done, todo, rows (file, empty: none)}, refused: host -> why, lines, key, ...}.
        Raises HsError where nothing can be divided.
        """
        if index.bad_total and not skip_bad_rows:
            raise HsError(
                "{} of {} rows of the data set are no valid samples: {}".format(
                    index.bad_total, len(index.lengths), "; ".join(index.bad)
                ),
                "everything: production was not touched",
                "mend the data set, or set hs_skip_bad_rows=true to go without these rows (hs_cut_to cuts long ones)",
            )
        present = self.present(shares)
        key = key_of(catalogue.reference(present).identity)
        self.forget(key, forget)
        kept = self.kept(key, [*shares, *forget])
        refused = catalogue.refusals(present + kept)
        lost = sorted(one.host for one in kept if one.host in refused)
        if lost:
            raise HsError(refused[lost[0]].split("\n")[0], "everything: production was not touched", _forget(lost[0]))
        if index.sha256 != catalogue.reference(present + kept).identity.get("dataset_sha256"):
            # the data set was read on a host that is refused: its rows are not the others'
            raise HsError(refused[min(refused)] if refused else "the index is of another data set")
        accepted = [one for one in present if one.host not in refused]
        self.keep(key, accepted)
        if not accepted:
            return {"parts": {}, "refused": refused, "lines": [], "key": key, "lost": []}
        merged = _merged(accepted + kept, index)
        if not plan:
            write(self.folder / key / "index", index.pack())
        open_shares = {one.host: Share.unpack(one.share) for one in accepted if one.share}
        owned = merged.counts()
        taken: Set[int] = set()
        for share in open_shares.values():
            taken.update(share.indices)
        todo = [
            (idx, tokens)
            for idx, tokens in enumerate(index.lengths)
            if tokens and not merged.has(idx) and idx not in taken
        ]
        free = {one.host: shares[one.host] for one in accepted if not one.run}
        parts = divide(todo, free, index.sha256) if free else {}
        answer: Dict[str, Any] = {"parts": {}, "refused": refused, "key": key, "lost": [one.host for one in kept]}
        made = []
        for one in accepted:
            chosen = set(one.indices)
            chosen.update(open_shares[one.host].indices if one.host in open_shares else parts.get(one.host, ()))
            made.append((Share.of(one.host, index, (idx for idx in chosen if idx < len(index.lengths))), one))
        rows = self._send(source, key, [share for share, one in made if not one.run]) if source and not plan else {}
        for share, one in made:
            file, only = rows.get(one.host, ("", ""))
            if one.run:
                only = open_shares[one.host].only if one.host in open_shares else ""
            share = replace(share, only=only, owned=owned[one.host])
            path = self.folder / key / ("plan" if plan else "share") / (safe(one.host) + ".txt")
            write(path, share.pack())
            done = len(one.indices)
            answer["parts"][one.host] = dict(
                share.facts(),
                share=str(path),
                done=done,
                todo=len(share.indices) - done,
                todo_tokens=share.tokens - one.tokens,
                rows=file,
                only=only,
            )
        whole = (len(index.lengths) - index.bad_total, sum(index.lengths))
        answer.update(samples=whole[0], tokens=whole[1], done=merged.samples, done_tokens=merged.tokens)
        answer["left_over"] = 0 if free else len(todo)
        answer["lines"] = _lines(answer, merged.twice)
        return answer

    def _send(self, source: str, key: str, shares: Sequence[Share]) -> Dict[str, Tuple[str, str]]:
        """Host -> (file with its rows alone, its sha256), where that is smaller than the data set by a tenth; for JSON lines only."""
        path = Path(source)
        if not path.is_file() or path.suffix in (".parquet", ".arrow"):
            return {}
        whose: Dict[int, List[int]] = {}
        for number, share in enumerate(shares):
            for idx in share.indices:
                whose.setdefault(idx, []).append(number)
        places = [self.folder / key / "share" / (safe(share.host) + ".jsonl") for share in shares]
        (self.folder / key / "share").mkdir(parents=True, exist_ok=True)
        handles = [place.open("wb") for place in places]
        total, idx = hashlib.sha256(), 0
        try:
            with path.open("rb") as lines:
                for line in lines:
                    total.update(line)
                    if line.strip():
                        for number in whose.get(idx, ()):
                            handles[number].write(line if line.endswith(b"\n") else line + b"\n")
                        idx += 1
        finally:
            for handle in handles:
                handle.close()
        if shares and total.hexdigest() != shares[0].sha256:
            raise HsError(
                "{} changed while it was read".format(path),
                "everything: production was not touched",
                "let whoever writes it come to an end, then start again",
            )
        found = {}
        for share, place in zip(shares, places):
            if len(share.indices) and place.stat().st_size < 0.9 * path.stat().st_size:
                found[share.host] = (str(place), dataset.digest(place))
        return found

    def index(self, key: str) -> Index:
        """The lengths that a data set was divided by last: under other limits it has other rows. Raises HsError."""
        path = self.folder / key / "index"
        if path.is_file():
            return Index.unpack(path.read_text(encoding="utf-8"))
        raise HsError(
            "{} holds no index of this data set: it was not divided from here".format(self.folder),
            "everything: no catalogue was written",
            "set hs_fleet_dir to the folder that extract.yml used, or run plan.yml with hs_fleet=true first",
        )

    def merge(self, hosts: Iterable[str], forget: Sequence[str] = ()) -> Dict[str, Any]:
        """Write the catalogue over all hosts; ``hosts``: those whose catalogue was just taken; ``forget``: those whose kept one is set aside.

        Returns its document, with path and lines.
        """
        present = self.present(hosts)
        identity = catalogue.reference(present).identity
        key = key_of(identity)
        index = self.index(key)
        self.forget(key, forget, for_good=True)
        merged = _merged(present + self.kept(key, [one.host for one in present]), index)
        # not before: one that belongs to another data set would be kept with this one's
        self.keep(key, present)
        rows = (len(index.lengths) - index.bad_total, sum(index.lengths))
        # not all that is finished need be among them: limits change, and rows that are none today count neither way
        missing = rows[0] - sum(map(bool, compress(merged.owner, index.lengths)))
        document = catalogue.document(merged, rows[0], rows[1], missing)
        path = self.folder / key / "catalogue.jsonl"
        part = path.with_name(".catalogue.{}".format(os.getpid()))
        with part.open("w", encoding="utf-8") as handle:
            handle.writelines(merged.lines())
        os.replace(str(part), str(path))
        fsio.write_json(path.with_suffix(".json"), document, 0o644)
        line = "{:,} of {:,} samples ({:,} of {:,} tokens) on {} hosts{}: {}".format(
            merged.samples,
            rows[0],
            merged.tokens,
            rows[1],
            sum(1 for one in document["hosts"].values() if one["finished"]),
            ", {:,} of them twice and kept once".format(merged.twice) if merged.twice else "",
            path,
        )
        lines = [line]
        if missing:
            lines.append("{:,} are missing: extract.yml again gives them to the hosts that are there".format(missing))
        return dict(document, path=str(path), lines=lines)


def _merged(catalogues: Sequence[Catalogue], index: Index) -> Merged:
    """All hosts' samples. Raises HsError where they may not be merged, or one is not as long as its row."""
    merged = catalogue.merge(catalogues)
    for one in catalogues:
        try:
            rows = array("I", map(index.lengths.__getitem__, one.indices))
        except IndexError:
            rows = array("I")
        if rows == one.lengths:
            continue
        # a row that is none under today's limits may have been one when it was extracted
        wrong = [
            "sample {} has {} tokens on {}, row {} of the data set has {}".format(idx, length, one.host, idx, row)
            for idx, length, row in zip(one.indices, one.lengths, rows)
            if row not in (0, length)
        ]
        if wrong or not rows:
            raise HsError(
                wrong[0] if wrong else "{} has samples beyond the end of the data set".format(one.host),
                "everything: production was not touched, and no catalogue was written",
                "look at {} on {}: its book is of another data set, or damaged".format(one.output, one.host),
            )
    return merged


def _forget(host: str) -> str:
    return "run with what it was made with, or go without what {0} finished: -e hs_fleet_forget={0}".format(host)


def _lines(answer: Mapping[str, Any], twice: int) -> List[str]:
    """The plan over all hosts: one line, and one for each host."""
    lines = [
        "{:,} samples, {:,} tokens on {} hosts; {:,} samples ({:,} tokens) are done{}".format(
            answer["samples"],
            answer["tokens"],
            len(answer["parts"]),
            answer["done"],
            answer["done_tokens"],
            ", {:,} of them twice".format(twice) if twice else "",
        )
    ]
    for host in sorted(answer["parts"]):
        part = answer["parts"][host]
        lines.append(
            "{}: {:,} samples, {:,} tokens to do; {:,} samples done".format(
                host, part["todo"], part["todo_tokens"], part["done"]
            )
        )
    if answer["lost"]:
        lines.append("not here, but counted with what they had finished: " + ", ".join(answer["lost"]))
    if answer["left_over"]:
        lines.append(
            "{:,} samples are nobody's: every host goes on with its open run; extract.yml again divides them".format(
                answer["left_over"]
            )
        )
    return lines

"""A run from specification to result: open everything, prove the states, extract, describe the output, say how it ended."""

from __future__ import annotations

import bisect
import os
import signal
import sqlite3
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from sglang_hs import dataset
from sglang_hs.dataset import BadRow, Limits, Row, sequence_name
from sglang_hs.errors import HsError
from sglang_hs.fsio import write_json
from sglang_hs.manifest import DONE, PENDING, SAMPLES, Manifest, Sample
from sglang_hs.model import fingerprint
from sglang_hs.moving import Mover, where
from sglang_hs.share import Share

from . import arrowset, canary, describe
from .dumpfile import Expected, check_header
from .exchange import Exchange
from .extract import Extraction, Halt, Tally, budget_message
from .faults import CanaryRefused, SampleFault, ServerGone
from .output import Output, book_fault, write_samples
from .progress import Progress
from .server import Server
from .spec import Spec

EXIT = {"complete": 0, "window": 3, "stopped": 3, "canary_refused": 4, "error_budget": 5, "failed": 1}


class Run:
    """One run of the client. Everything it holds open is closed again, whatever happens."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.limits = Limits(spec.vocab_size, spec.max_prompt, spec.cut_to)
        self.tally = Tally()
        self.output = Output(spec.output)
        self.exchange = Exchange(Path(spec.dump_dir))
        self.server = Server(spec.server, spec.api_key, spec.request_timeout_s)
        self.progress = Progress(Path(spec.run_dir), self.tally.snapshot, spec.dump_dir, spec.output_dir, self._moving)
        self.numbers: Dict[str, Any] = {}
        self.share: Optional[Share] = None  # of several hosts' data set; None: all of it is this host's
        self.manifest: Optional[Manifest] = None
        self.extraction: Optional[Extraction] = None
        self.mover: Optional[Mover] = None
        self._tokens_before = 0
        self._halt: Optional[Halt] = None  # a signal that came before the extraction began

    def execute(self) -> int:
        """Run, write result.json, return the exit code."""
        started = time.time()
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        Path(self.spec.run_dir).mkdir(parents=True, exist_ok=True)
        self.progress.start()
        halt = Halt("failed", "the client was ended", "what is done stays")
        try:
            halt = self._work()
        except CanaryRefused as error:
            halt = Halt("canary_refused", error.what, error.left)
        except HsError as error:
            halt = _failed(error)
        except sqlite3.Error as error:
            halt = _failed(book_fault(error, self.spec.output))
        except ServerGone as error:
            halt = Halt("failed", str(error), "what is done stays")
        except Exception as error:
            halt = Halt("failed", "the client failed: {!r}".format(error), "what is done stays")
        finally:
            if self.mover is not None:
                self.mover.stop()  # production does not wait for a remote: playbooks/move.yml, or the next run, moves the rest
                halt = self._tell_moved(halt)
            try:
                if self.manifest is not None:
                    self.manifest.close()
            except sqlite3.Error as error:  # what the book does not have is verified and entered by the next run
                halt = _failed(book_fault(error, self.spec.output))
            self.exchange.close()
            self.output.close()
        self.progress.phase("done", halt.message)
        self.progress.stop()
        result = {
            "outcome": halt.outcome,
            "message": halt.message,
            "left": halt.left,
            "counts": self.tally.snapshot(),
            "canary": self.numbers,
            "seconds": round(time.time() - started, 3),
            "tokens_this_run": self.tally.snapshot().get("tokens_done", 0) - self._tokens_before,
            "run_id": self.spec.run_id,
        }
        if self.mover is not None:
            result["moving"] = self._moving()
        write_json(Path(self.spec.run_dir) / "result.json", result, 0o644)
        print("{}: {}".format(halt.outcome, halt.message), flush=True)
        return EXIT[halt.outcome]

    def _on_signal(self, number: int, frame: Any) -> None:
        halt = Halt(
            "stopped",
            "stopped by {}".format(signal.Signals(number).name),
            "what is done stays; the next run goes on from there",
        )
        self._halt = halt
        if self.extraction is not None:
            # not from the handler itself: it interrupts the main thread, which may hold the lock that stop() takes
            threading.Thread(target=self.extraction.stop, args=(halt,)).start()

    def _moving(self) -> Dict[str, Any]:
        """What the mover says, and how long the extraction was held back for it: held_s, holding_since (unix time or None). {} without one."""
        if self.mover is None:
            return {}
        held = self.extraction
        since = held.holding if held is not None else None
        spent = held.held_s + (time.time() - since if since else 0.0) if held is not None else 0.0
        return dict(self.mover.status(), held_s=round(spent, 1), holding_since=since)

    def _tell_moved(self, halt: Halt) -> Halt:
        """What is at the remote, and who moves the rest, in the outcome."""
        assert self.manifest is not None and self.spec.move is not None
        known = self.manifest.moved_counts()
        waiting = self.manifest.counts()["done"] - known["moved"]
        said = where(known["roots"] or {self.spec.move.to: 0})
        if waiting:
            said += (
                ", {:,} are still here: playbooks/move.yml moves them beside production, or the next run does".format(
                    waiting
                )
            )
        elif halt.outcome == "complete":
            said += "; playbooks/move.yml puts their description beside them"
        return Halt(halt.outcome, "{}; {}".format(halt.message, said), halt.left)

    def _begin_to_move(self, manifest: Manifest) -> None:
        """Start what moves finished samples on, also those of earlier runs."""
        if self.spec.move is None:
            return
        manifest.set("move", dict(self.spec.move._asdict(), options=list(self.spec.move.options)))
        manifest.commit()

        def release(sample: Sample, path: Path) -> bool:
            held = self.extraction
            if held is not None:
                return held.release(sample, path)
            path.unlink(missing_ok=True)
            return True

        def spoiled(sample: Sample, reason: str) -> None:
            self.tally.add(done=-1, tokens_done=-sample.length, bytes_done=-(sample.bytes or 0))

        self.mover = Mover(self.spec.output, manifest, self.spec.move, release, spoiled)
        self.mover.start()

    def _work(self) -> Halt:
        spec = self.spec
        self.output.open()
        self.exchange.open()
        attached = self.exchange.check(spec)
        expected = Expected(spec.states, spec.hidden_size, attached["dtype"], spec.final)
        self.share = _share(spec)
        self.manifest = manifest = Manifest(spec.output)
        identity = {
            "dataset_sha256": self.share.sha256 if self.share else dataset.digest(spec.dataset),
            "cut_to": spec.cut_to,
            "model": fingerprint(Path(spec.model_path)),
            "hidden_size": spec.hidden_size,
            "boundaries": spec.boundaries,
            "final": spec.final,
            "dtype": attached["dtype"],
        }
        if manifest.claim(identity):
            manifest.set("release", attached["release"])
        if self.share:
            # what is gone here may be another host's by now: only what is in the share is entered again
            self._verify_done(manifest, expected)
            self._enter_share(manifest)
        else:
            self._enter_rows(manifest)
            self._verify_done(manifest, expected)
        self._count(manifest)
        counts = manifest.counts()
        if counts["bad"] > spec.error_budget:
            message = budget_message(manifest, spec.error_budget, counts["bad"])
            return Halt("error_budget", message, "everything: no sample was extracted in this run")
        self._begin_to_move(manifest)
        if counts["pending"]:
            self._prove(expected, int(attached["tp_size"]))
            self.progress.phase("extract")
            extraction = Extraction(spec, self.server, self.exchange, self.output, manifest, expected, self.tally)
            extraction.mover = self.mover
            self.extraction = extraction
            if self._halt is not None:
                extraction.stop(self._halt)
            extraction.run(self._rows(_of_state(manifest, PENDING)))
        else:
            extraction = None
            self.numbers = manifest.get("canary") or {}
        self.progress.phase("finish", "describing the output")
        halt = extraction.halt if extraction is not None else None
        counts = manifest.counts()
        if halt is not None and halt.outcome == "window":
            done = "{} of {} samples and {} of {} tokens are done".format(
                counts["done"], counts["total"], counts["tokens_done"], counts["tokens_total"]
            )
            halt = Halt(halt.outcome, "{}: {}".format(halt.message, done), halt.left)
        if halt is None and counts["pending"]:
            halt = Halt(
                "stopped",
                "{} samples were damaged on the disk before they could be moved (their files are in quarantine)".format(
                    counts["pending"]
                ),
                "what is done stays; the next run extracts these again",
            )
        if halt is None or (counts["pending"] == 0 and halt.outcome in ("window", "stopped")):
            message = "{} of {} samples are in {}".format(counts["done"], counts["total"], spec.output_dir)
            lost = counts["failed"] + counts["bad"]
            halt = Halt(
                "complete", message, "{} samples in quarantine, each with its reason".format(lost) if lost else ""
            )
        extra: Dict[str, Any] = {}
        if halt.outcome == "complete":
            extra = self._write_rows(manifest)
            if "missing" in extra["arrow"]:
                note = "no arrow data set beside them: {missing}. Next: {next}".format(**extra["arrow"])
                halt = Halt(halt.outcome, "{}; {}".format(halt.message, note), halt.left)
        if self.share:
            extra["share"] = dict(self.share.facts(), host=self.share.host, of_rows=self.share.rows)
        describe.write(spec.output, describe.manifest(spec, attached, identity, counts, self.numbers, extra))
        return halt

    # -- before --------------------------------------------------------------------------------------------------------

    def _enter_rows(self, manifest: Manifest) -> None:
        """Fill the book with the data set's rows, once; the claimed checksum vouches for them afterwards."""
        if manifest.get("entered") is True:
            manifest.retry_failed()
            return
        self.progress.say("reading the data set")
        page: List[Tuple[int, Optional[str], int, Optional[str]]] = []

        def enter(row: Any) -> None:
            bad = isinstance(row, BadRow)
            page.append(
                (row.idx, None if bad else row.name, 0 if bad else len(row.input_ids), str(row) if bad else None)
            )
            if len(page) >= 1000:
                manifest.add(page)
                page.clear()

        dataset.scan(self.spec.dataset, self.spec.vocab_size, self.spec.max_prompt, self.spec.cut_to, each=enter)
        manifest.add(page)
        manifest.set("entered", True)
        manifest.commit()
        for sample in manifest.samples("bad"):
            self.output.quarantine(sample.idx, sample.reason or "", {})

    def _enter_share(self, manifest: Manifest) -> None:
        """The share as it is now: what is finished stays in the book, what is not is this share's and no other's."""
        self.progress.say("reading this host's share of the data set")
        manifest.forget_undone()
        manifest.set("entered", "a share")
        done = _of_state(manifest, DONE)
        page: List[Tuple[int, Optional[str], int, Optional[str]]] = []
        for row in self._checked(lambda idx: not done(idx)):
            if isinstance(row, BadRow):  # it was none when the data set was divided
                raise HsError(str(row), "everything: no sample was extracted", "run extract.yml anew: it divides again")
            page.append((row.idx, row.name, len(row.input_ids), None))
            if len(page) >= 1000:
                manifest.add(page)
                page.clear()
        manifest.add(page)
        manifest.commit()

    def _verify_done(self, manifest: Manifest, expected: Expected) -> None:
        """Trust no row of the book: each file must be there, of its size, with a header that fits.

        The header of a file whose inode has not changed since it was entered (ctime, which nobody can set) is what it was then.
        """
        self.progress.say("verifying what is done")
        root = str(self.spec.output) + os.sep
        for idx, file, size, changed, _ in manifest.done_files():
            if file is None:
                continue  # at the remote: its bytes were verified there before the file here went
            try:
                info = os.stat(root + file)
                if info.st_size == size and info.st_ctime <= changed:
                    continue
                sample = manifest.sample(idx)
                assert sample is not None and sample.name is not None
                header = check_header(Path(root + file), sample.length, sample.name, expected)
                if header.size != size:
                    raise SampleFault("another size")
            except (SampleFault, OSError):
                manifest.again(idx)
        manifest.commit()

    def _count(self, manifest: Manifest) -> None:
        counts = manifest.counts()
        self._tokens_before = counts["tokens_done"]
        self.tally.add(
            total=counts["total"],
            done=counts["done"],
            failed=counts["failed"],
            quarantined=counts["failed"] + counts["bad"],
            tokens_total=counts["tokens_total"],
            tokens_done=counts["tokens_done"],
            bytes_done=counts["bytes_done"],
            forwards=0,
            shared=0,
        )

    def _prove(self, expected: Expected, ranks: int) -> None:
        """The canary on prompts out of the data set and on its longest sample."""
        assert self.manifest is not None
        if self.spec.canary.skip:
            self.numbers = {"skipped": True}
            return
        self.progress.phase("canary", "proving the states before the data set")
        rows: List[List[int]] = []
        longest: List[int] = []
        longest_idx, wanted = self.manifest.longest(), self.spec.canary.sequences
        for row in self._rows(lambda idx: len(rows) < wanted or idx == longest_idx):
            if len(rows) < wanted and row.input_ids not in rows:
                rows.append(row.input_ids)
            if row.idx == longest_idx:
                longest = row.input_ids
            if longest and len(rows) == wanted:
                break
        prompts = [(sequence_name(ids), ids) for ids in canary.prompts(rows, self.spec)]
        check = canary.Canary(self.spec, self.server, self.exchange, expected, ranks)
        try:
            check.run(prompts, (sequence_name(longest), longest))
        finally:
            self.numbers = asdict(check.numbers)
        self.manifest.set("canary", self.numbers)

    def _rows(self, wanted: Optional[Callable[[int], bool]] = None) -> Iterator[Row]:
        return (row for row in self._checked(wanted) if isinstance(row, Row))

    def _checked(self, wanted: Optional[Callable[[int], bool]] = None) -> Iterator[Any]:
        """The rows that are this host's, with the data set's numbers, those without fault and those with one."""
        share = self.share
        if share is None:
            yield from dataset.rows(self.spec.dataset, self.limits, wanted)
            return
        indices = share.indices
        if not share.only:

            def mine(idx: int) -> bool:
                place = bisect.bisect_left(indices, idx)
                return place < len(indices) and indices[place] == idx and (wanted is None or wanted(idx))

            yield from dataset.rows(self.spec.dataset, self.limits, mine)
            return
        chosen = None if wanted is None else (lambda place: wanted(indices[place]))
        for row in dataset.rows(self.spec.dataset, self.limits, chosen):
            yield replace(row, idx=indices[row.idx])

    # -- after ---------------------------------------------------------------------------------------------------------

    def _write_rows(self, manifest: Manifest) -> Dict[str, Any]:
        """The tokens and the loss masks beside the states: samples.jsonl, a line for each sample that is there, and the arrow data set."""
        reason = arrowset.missing()
        arrow = None
        try:
            if reason is None:
                arrow = arrowset.ArrowSet(self.spec.output)
            else:
                arrowset.remove(self.spec.output)

            def lines() -> Iterator[Dict[str, Any]]:
                for row in self._rows():
                    sample = manifest.sample(row.idx)
                    if sample is not None and sample.state == DONE:
                        mask = row.loss_mask if row.loss_mask is not None else [1] * len(row.input_ids)
                        if arrow is not None:
                            arrow.add(row.idx, row.input_ids, mask)
                        yield {
                            "idx": row.idx,
                            "file": sample.file,
                            "seq_len": len(row.input_ids),
                            "input_ids": row.input_ids,
                            "loss_mask": mask,
                        }

            count = write_samples(self.spec.output / SAMPLES, lines())
            whole = self.share.rows if self.share else manifest.counts()["total"]
            rows = arrow.finish(whole) if arrow is not None else 0
        except OSError as error:
            raise self.output.fault(error) from error
        finally:
            if arrow is not None:
                arrow.close()
        told: Dict[str, Any] = {"rows": rows, "load": "datasets.load_from_disk of this folder"}
        if reason is not None:
            told = {"missing": reason, "next": arrowset.next_step(self.spec.output)}
        return {"samples": {"file": SAMPLES, "rows": count}, "arrow": told}


def _share(spec: Spec) -> Optional[Share]:
    """The host's share, None where there is none. Raises HsError where the data set on the host is not the one that was divided."""
    if not spec.share:
        return None
    share = Share.unpack(Path(spec.share).read_text(encoding="ascii"))
    found, wanted = dataset.digest(spec.dataset), share.only or share.sha256
    if found != wanted:
        raise HsError(
            "{} is not the data set that was divided: its sha256 is {}, not {}".format(spec.dataset, found, wanted),
            "everything: no sample was extracted",
            "give every host the same file, then start again",
        )
    return share


def _of_state(manifest: Manifest, state: str) -> Callable[[int], bool]:
    """Tells of each row, asked in order, whether its sample is in ``state``: the book's pages beside the data set's rows."""
    found = (sample.idx for sample in manifest.samples(state))
    following = next(found, None)

    def is_so(idx: int) -> bool:
        nonlocal following
        while following is not None and following < idx:
            following = next(found, None)
        return following == idx

    return is_so


def _failed(error: HsError) -> Halt:
    return Halt("failed", "{}{}".format(error.what, " Next: " + error.next if error.next else ""), error.left)

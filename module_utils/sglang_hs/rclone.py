"""rclone, called: copies files to a remote, asks what lies there. No uploader of our own, and no secret in an argv, a log or an environment.

The remote's secrets stand in a configuration file that only its owner can read; rclone is told its path. What rclone says is kept with
the file's secret values taken out.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import threading
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from .errors import HsError
from .secrets import HIDDEN

OLDEST = (1, 60)  # Debian 12's; older ones were not tried
HASHES = (
    "sha256",
    "md5",
    "sha1",
)  # that a remote may keep and we can compute, in the order in which they are asked for
OWNER = "hs-owner.json"  # at a remote's folder: whose it is
NAMES = ("hidden_states/", "archives/", "manifest.sqlite")  # of which at least one is where samples are
KEEP = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "SSH_AUTH_SOCK")
PROXY = re.compile(r"(?:https?|no|all)_proxy", re.IGNORECASE)
# parameters of a connection string and names of options that are secrets; files that hold one are none themselves
_SECRET = re.compile(
    r"(?:^|[:,_])(?:pass\w*|secret\w*|token|credentials?|auth|\w*access_key\w*|\w*key|sas_url|bearer\w*)$", re.I
)
_SECRET_KEYS = re.compile(r"pass|secret|token|key|credential|auth|sas_url|cookie|bearer", re.IGNORECASE)
_PUBLIC_KEYS = re.compile(
    r".*(?:_file|_path|_url|_type|_mode|provider)|env_auth|known_hosts_file|chunk.*|.*_agent", re.IGNORECASE
)


class Ended(Exception):
    """The call was ended by :meth:`Rclone.stop`: nothing is known of what it did."""


class Failed(Exception):
    """A call that went wrong; the text is rclone's own last word, without secrets."""


class Foreign(HsError):
    """The remote's folder is another output's, or this output folder itself: no time mends that."""


class Rclone:
    """Calls of one ``binary`` with one ``config`` ("": none; remotes are then named in full, or local folders) and more ``options``.

    One call at a time and object; :meth:`stop` from another thread ends it and every later one. Whoever kills this process kills rclone.
    """

    def __init__(self, binary: str = "rclone", config: str = "", options: Sequence[str] = ()) -> None:
        self.binary = binary
        self.config = config
        self.options = list(options)
        self._hidden = secret_values(config)
        self._lock = threading.Lock()
        self._process: Optional["subprocess.Popen[str]"] = None
        self._stopped = False

    def again(self) -> "Rclone":
        """Another one of the same settings, for calls at the same time."""
        return Rclone(self.binary, self.config, self.options)

    def stop(self) -> None:
        """End the call at work, at once, and let none begin."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                with contextlib.suppress(OSError):
                    self._process.kill()

    def call(self, *words: str, text: str = "", patience: float = 600.0) -> Tuple[int, str, str]:
        """(exit status, standard output, what it said) of ``rclone words``; ``text``: its standard input. ``patience`` in seconds.

        Ended where :meth:`stop` came before its end; Failed where it cannot be started or takes longer.
        """
        argv = [self.binary, *words, "--config", self.config, "--contimeout", "15s", "--timeout", "60s"]
        argv += ["--retries", "1", "--low-level-retries", "3", "--stats", "0", *self.options]
        program = shutil.which("setpriv")
        if program is not None:  # rclone dies with us, whatever ends us
            argv = [program, "--pdeathsig", "KILL", "--", *argv]
        try:
            with self._lock:
                if self._stopped:
                    raise Ended()
                process = self._process = subprocess.Popen(
                    argv,
                    env=environment(os.environ),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    universal_newlines=True,
                    errors="replace",
                )
        except OSError as error:
            raise Failed("{} cannot be started: {}".format(self.binary, error)) from error
        try:
            out, said = process.communicate(text, patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise Failed("rclone {} was not through after {:.0f} s".format(words[0], patience)) from None
        finally:
            with self._lock:
                self._process = None
        if self._stopped:
            raise Ended()
        return process.returncode, out, self.clean(said)

    def clean(self, text: str) -> str:
        """``text`` without the secret values of the configuration."""
        for value in self._hidden:
            text = text.replace(value, HIDDEN)
        return text

    # -- what is asked of it -------------------------------------------------------------------------------------------

    def version(self) -> Tuple[int, int]:
        """(major, minor). Failed where the program does not answer as rclone does."""
        code, out, said = self.call("version", patience=60)
        found = re.match(r"rclone v(\d+)\.(\d+)", out)
        if code != 0 or not found:
            raise Failed("{} version: {}".format(self.binary, last_words(said or out)))
        return int(found.group(1)), int(found.group(2))

    def copy(self, source: str, root: str, files: Sequence[str], again: bool = False, patience: float = 600.0) -> None:
        """Copy ``files`` (relative) from the folder ``source``. ``again``: also those that look as if they were there already.

        rclone's own comparison of checksums afterwards is left out: :meth:`hashes` follows, against better ones. Failed where any could
        not be copied.
        """
        words = ["copy", "--no-traverse", "--ignore-checksum", "--files-from-raw", "-", source, folder(root)]
        code, _, said = self.call(*words, *(["--ignore-times"] if again else []), text=listed(files), patience=patience)
        if code != 0:
            raise Failed("rclone copy: " + last_words(said))

    def hashes(
        self, root: str, files: Sequence[str], kind: str, download: bool, patience: float = 600.0
    ) -> Dict[str, str]:
        """file -> its checksum at the remote, of those that are there. ``kind``: as in HASHES. ``download``: computed here, from what comes back.

        Without ``download``, {} where the remote has no such checksums. Failed where it cannot be asked.
        """
        words = ["hashsum", kind, "--files-from-raw", "-", folder(root)] + (["--download"] if download else [])
        code, out, said = self.call(*words, text=listed(files), patience=patience)
        found = {}
        for line in out.splitlines():
            value, _, name = line.partition("  ")
            if name and re.fullmatch(r"[0-9a-f]{32,}", value):
                found[name] = value
        if code != 0 and not found and not download and "unsupported" in said.lower():
            return {}
        if code != 0 and "directory not found" in said.lower():
            return {}
        if code != 0:
            raise Failed("rclone hashsum: " + last_words(said))
        return found

    def kinds(self, root: str) -> Optional[List[str]]:
        """Which checksums the remote itself has, as rclone knows; None where it does not say."""
        try:
            code, out, _ = self.call("backend", "features", folder(root), patience=120)
            return [str(kind) for kind in json.loads(out)["Hashes"] or []] if code == 0 else None
        except (Failed, ValueError, KeyError, TypeError):
            return None

    def delete(self, root: str, file: str) -> None:
        """Remove a file at the remote; one that is not there is no failure."""
        code, _, said = self.call("deletefile", folder(root) + file)
        if code != 0 and "not found" not in said.lower() and "doesn't exist" not in said.lower():
            raise Failed("rclone deletefile: " + last_words(said))

    def listing(self, root: str) -> List[str]:
        """What lies in the remote's folder, folders with a slash; [] where it is not there yet. Failed where it cannot be looked at."""
        code, out, said = self.call("lsf", "--max-depth", "1", folder(root), patience=120)
        if code != 0 and "directory not found" not in said.lower():
            raise Failed("rclone lsf: " + last_words(said))
        return out.splitlines()

    def probe(self, root: str, name: str) -> None:
        """Write a small file at the remote, read it back, remove it. Failed with what did not work."""
        text = "this file may be removed: " + name + "\n"
        code, _, said = self.call("rcat", folder(root) + name, text=text, patience=120)
        if code != 0:
            raise Failed("it cannot be written: " + last_words(said))
        try:
            code, out, said = self.call("cat", folder(root) + name, patience=120)
            if code != 0 or out != text:
                raise Failed("what was written cannot be read back: " + last_words(said or "other bytes came back"))
        finally:
            self.delete(root, name)

    def text(self, root: str, name: str) -> Optional[str]:
        """A small file at the remote, None where there is none."""
        code, out, said = self.call("cat", folder(root) + name, patience=120)
        if code in (3, 4) or (code != 0 and "not found" in said.lower()):  # of a folder, of a file
            return None
        if code != 0:
            raise Failed("rclone cat: " + last_words(said))
        return out or None

    def put(self, root: str, name: str, text: str) -> None:
        """Write a small file at the remote."""
        code, _, said = self.call("rcat", folder(root) + name, text=text, patience=120)
        if code != 0:
            raise Failed("rclone rcat: " + last_words(said))

    def free(self, root: str) -> Optional[int]:
        """Bytes that are free at the remote, None where it does not tell."""
        code, out, _ = self.call("about", root, patience=60)
        found = re.search(r"^Free:\s+([\d.]+)\s*([KMGTPE]?)i?B?$", out, re.MULTILINE) if code == 0 else None
        return int(float(found.group(1)) * 1024 ** " KMGTPE".index(found.group(2) or " ")) if found else None


def owner_of(text: Optional[str]) -> Dict[str, str]:
    """{owner, output} out of the file OWNER; {} where there is none."""
    try:
        found = json.loads(text or "{}")
        return {str(key): str(value) for key, value in found.items()}
    except (ValueError, AttributeError):
        return {"owner": "?", "output": "somebody who wrote {!r}".format((text or "")[:40])}


def claim(tool: Rclone, root: str, owner: str, output: str, write: bool = True, known: int = 0) -> str:
    """A remote's folder belongs to one output folder: two would write files of the same names. What OWNER holds there, "" where it is nobody's.

    ``owner``: the mark of the output folder's book, "" where it has none yet. ``write``: mark a folder that is nobody's. ``known``: samples that
    the book has there. HsError where the folder is another's, or holds no mark although samples are there. Failed where it cannot be asked.
    """
    text = tool.text(root, OWNER)
    back = "echo '{}' | rclone rcat {}".format(json.dumps({"owner": owner}), folder(root) + OWNER)
    if not text and known:
        raise HsError(
            "{} has no {}, although {:,} samples were moved there".format(root, OWNER, known),
            "the samples here and the book",
            "mount the disk or share that they are on. If only that file was lost, put it back: " + back,
        )
    strange = [] if text else sorted(set(tool.listing(root)) & set(NAMES))
    if strange:  # ours have the same names
        raise Foreign(
            "{} holds {} already, and no {} that says whose".format(root, ", ".join(strange), OWNER),
            "that folder and the samples here",
            "give hs_move_to a folder of its own"
            + (". If it is this output's and only that file was lost, put it back: " + back if owner else ""),
        )
    if not text and write:
        named = {"owner": owner, "output": "{}:{}".format(os.uname().nodename, output)}
        text = json.dumps(named) + "\n"
        tool.put(
            root, OWNER, text
        )  # whether it stays is seen with each batch: another output may come in the same moment
    found = owner_of(text)
    if found and found.get("owner") != owner:
        raise Foreign(
            "{} holds the samples of another output folder, {}".format(root, found.get("output")),
            "that folder and the samples here",
            "give hs_move_to a folder of its own: for several hosts, NAME:path/{{ inventory_hostname }}",
        )
    return text or ""


def folder(root: str) -> str:
    """``root`` as a folder: with a slash at its end no remote is asked whether it is a file."""
    return root if root.endswith(("/", ":")) else root + "/"


def listed(files: Sequence[str]) -> str:
    """``files`` for --files-from-raw."""
    return "".join(file + "\n" for file in files)


def last_words(said: str) -> str:
    """The line of rclone's output that tells most: the first error, without its date."""
    lines = [
        re.sub(r"^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d ", "", line).strip() for line in said.splitlines() if line.strip()
    ]
    errors = [line for line in lines if line.startswith(("ERROR", "CRITICAL", "NOTICE: Failed", "Failed", "Fatal"))]
    return (errors or lines or ["it said nothing"])[0][:400]


def environment(variables: Mapping[str, str]) -> Dict[str, str]:
    """What rclone gets of our environment: production's, which ours comes from, may hold RCLONE_ settings and secrets of its own.

    HOME is the user's own, not production's: a key file below ~ is then the same one for preflight and for the client.
    """
    found = {key: value for key, value in variables.items() if key in KEEP or PROXY.fullmatch(key)}
    with contextlib.suppress(KeyError):  # a user without an entry
        found["HOME"] = pwd.getpwuid(os.geteuid()).pw_dir
    return found


def secret_values(config: str) -> List[str]:
    """The values in a configuration file that nobody is to read anywhere else, the longest first; [] where it cannot be read."""
    try:
        text = Path(config).read_text(encoding="utf-8") if config else ""
    except (OSError, UnicodeDecodeError):
        return []
    found = set()
    for line in text.splitlines():
        key, equals, value = (part.strip() for part in line.partition("="))
        if equals and len(value) >= 4 and _SECRET_KEYS.search(key) and not _PUBLIC_KEYS.fullmatch(key):
            found.add(value)
    return sorted(found, key=len, reverse=True)


# -- what an operator may name -------------------------------------------------------------------------------------------


def check(move_to: str, config: str, options: Sequence[str], untouched: str) -> None:
    """HsError where the settings hold a secret, or the configuration is one that others can read."""
    named = [("hs_move_to", part.rpartition("=")[0]) for part in re.findall(r"[^,:]*=", move_to)]
    named += [("hs_rclone_options", word.lstrip("-").partition("=")[0]) for word in options if word.startswith("-")]
    for name, text in named:
        if _SECRET.search(text.replace("-", "_")):
            raise HsError(
                "{} holds what looks like a secret ({}); command lines are for everybody to read".format(name, text),
                untouched,
                "put the remote with its secrets into the file that hs_rclone_config names (rclone config), and name it as NAME:path",
            )
    if "\n" in move_to or move_to.startswith("-") or (":" not in move_to and not move_to.startswith("/")):
        raise HsError(
            "hs_move_to is {!r}: neither a remote of rclone (NAME:path) nor an absolute path".format(move_to),
            untouched,
            "correct it in the inventory",
        )
    if not config:
        return
    try:
        seen = os.stat(config)
    except OSError as error:
        raise HsError(
            "hs_rclone_config {} cannot be looked at: {}".format(config, error), untouched, "put it there, 0600"
        ) from error
    if not stat.S_ISREG(seen.st_mode) or seen.st_mode & 0o077 or seen.st_uid not in (0, os.geteuid()):
        raise HsError(
            "hs_rclone_config {} is not a file that only its owner can read (mode {:o}, uid {})".format(
                config, stat.S_IMODE(seen.st_mode), seen.st_uid
            ),
            untouched,
            "chown it to the user of the run and chmod 600 it: it holds the remote's secrets",
        )


def look(settings: Mapping[str, Any], untouched: str, write: bool, owner: str = "", known: int = 0) -> Dict[str, Any]:
    """Whether the remote of a run is there, before anything is stopped: {version, program: its path, free: bytes or None}. HsError where it is not fit.

    ``settings``: move_to, rclone, rclone_config, rclone_options. ``write``: also write and remove a small file there. ``owner``: the mark of
    the output folder's book. ``known``: samples that it has there.
    """
    root = str(settings["move_to"])
    check(root, str(settings["rclone_config"]), settings["rclone_options"], untouched)
    tool = Rclone(str(settings["rclone"]), str(settings["rclone_config"]), settings["rclone_options"])
    try:
        version = tool.version()
    except Failed as error:
        raise HsError(
            "rclone is not to be had: {}".format(error), untouched, "install rclone, or name the program with hs_rclone"
        ) from error
    if version < OLDEST:
        raise HsError(
            "{} is rclone {}.{}".format(tool.binary, *version),
            untouched,
            "install {}.{} or later, or name the program with hs_rclone".format(*OLDEST),
        )
    try:
        claim(tool, root, owner, "", write=False, known=known)
        if write:
            tool.probe(root, ".hs-probe-{}-{}".format(os.uname().nodename, os.getpid()))
        program = shutil.which(tool.binary) or tool.binary  # the client's PATH is production's
        return {"version": "{}.{}".format(*version), "program": program, "free": tool.free(root)}
    except Failed as error:
        raise HsError(
            "hs_move_to {} is of no use: {}".format(root, error),
            untouched,
            "try it on the host: {} --config {} lsf {}".format(tool.binary, tool.config or '""', root),
        ) from error

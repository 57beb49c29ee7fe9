#!/usr/bin/env python3
"""Real systemd hosts on one machine, for the molecule scenarios.

Each host is ``systemd-nspawn`` with systemd as PID 1, on an overlay over one cached Debian tree, in a network
namespace of its own, reached over real ssh with host key checking on. Only the Python standard library is used.

    rig.py check                        can this machine run it? exit 3 and one line with the reason if not
    rig.py base                         build the cached base tree (once)
    rig.py cache                        print the cache folder
    rig.py up NAME OCTET [options]      start a host; prints its connection as JSON once ssh answers
    rig.py down NAME | down --all       stop a host and remove every trace of it
    rig.py cut NAME | heal NAME         take its network link away; give it back and wait for ssh
    rig.py pause NAME | resume NAME     stop all that runs on it, and its link; have both go on, and wait for ssh
    rig.py reboot NAME [--hard]         restart it, in order or as a power cut does
    rig.py limits NAME                  have MemoryMax= and TasksMax= enforced inside (they are not without this)
    rig.py show NAME                    print its connection as JSON again

Everything lives in ``$HS_CACHE/rig`` (HS_CACHE defaults to ``sglang-hidden-states`` in the user's cache folder), and
all names in the kernel (bridge, namespaces, cgroups) carry a short hash of that path: two rigs with different caches
do not meet. The network is 10.203.X.0/24 with X from the same hash; HS_RIG_NET="10.1.2" chooses another.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

EXIT_CANNOT_RUN = 3
SSH_TIMEOUT = 60.0
KILL_TIMEOUT = 20.0
NSPAWN_WANTS_REBOOT = 133
SIGRTMIN_REBOOT = signal.SIGRTMIN + 5  # what systemd as PID 1 takes as "systemctl reboot"

TOOLS = ("mmdebstrap", "systemd-nspawn", "ip", "mount", "umount", "ssh-keygen", "nsenter", "apt-get", "apt-config")

# What a host has: a small server, and the shared libraries that CPython and the engine's wheels load from the system.
PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "libpam-systemd",
    "udev",
    "openssh-server",
    "python3",
    "procps",
    "iproute2",
    "acl",
    "sudo",
    "ca-certificates",
    "libbz2-1.0",
    "libcrypt1",
    "libexpat1",
    "libffi8",
    "libgcc-s1",
    "libgomp1",
    "liblzma5",
    "libncursesw6",
    "libnuma1",
    "libreadline8",
    "libsqlite3-0",
    "libssl3",
    "libstdc++6",
    "libuuid1",
    "zlib1g",
)

# Units that make no sense in such a host, or that slow its boot down.
MASKED_UNITS = (
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "console-getty.service",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty.target",
    "systemd-journal-flush.service",
    "systemd-networkd-wait-online.service",
    "systemd-networkd.service",
    "systemd-random-seed.service",
    "systemd-resolved.service",
    "systemd-timesyncd.service",
    "systemd-udev-trigger.service",
    "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket",
    "systemd-udevd.service",
    "systemd-update-utmp.service",
)

SSHD_CONFIG = """\
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
GSSAPIAuthentication no
MaxStartups 100:30:200
MaxSessions 100
"""

JOURNALD_CONFIG = """\
[Journal]
Storage=volatile
RuntimeMaxUse=64M
RateLimitBurst=0
"""


class RigError(Exception):
    """Something the caller can read and act on."""


# ---------------------------------------------------------------------------------------------------------------------
# Small helpers


def run(*argv: str | Path, check: bool = True) -> str:
    """Run a command and return what it printed; with check, a failure carries its own words."""
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if check and done.returncode != 0:
        words = (done.stderr or done.stdout).strip()
        raise RigError(f"{' '.join(map(str, argv))}: exit {done.returncode}: {words}")
    return done.stdout


def cache_dir() -> Path:
    """The project's cache folder. The home is the account's own: tests run with a private HOME."""
    if given := os.environ.get("HS_CACHE"):
        return Path(given)
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg) if xdg else Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache"
    return base / "sglang-hidden-states"


def mounts_below(top: Path) -> list[Path]:
    """Mount points at or below a folder, the deepest first."""
    prefix = os.path.realpath(top)
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), line.split(" ")[4])
        if point == prefix or point.startswith(prefix + "/"):
            found.append(Path(point))
    return sorted(found, key=lambda p: len(p.parts), reverse=True)


def remove_tree(top: Path) -> None:
    """Unmount everything below a folder, then remove it; never removes through a mount."""
    for point in mounts_below(top):
        if subprocess.run(["umount", str(point)], capture_output=True, check=False).returncode != 0:
            run("umount", "--lazy", point)
    if left := mounts_below(top):
        raise RigError(f"still mounted, so not removed: {left[0]}")
    if top.exists():
        shutil.rmtree(top)


def write_atomic(path: Path, text: str) -> None:
    """Replace a small file in one step."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold an exclusive lock on a file; yields its descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle.fileno()


def process_stamp(pid: int) -> str | None:
    """What tells a process from a later one with the same number: this boot and the start time."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    if fields[0] == "Z":
        return None
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{fields[19]}"


def cgroup_roots() -> list[Path]:
    """The cgroup hierarchies in which a host needs a group of its own."""
    top = Path("/sys/fs/cgroup")
    if (top / "cgroup.controllers").exists():  # the unified hierarchy alone
        return [top]
    return [top / c for c in ("systemd", "unified", "memory", "pids") if (top / c / "cgroup.procs").exists()]


# ---------------------------------------------------------------------------------------------------------------------
# The rig: what the hosts share


class Rig:
    """Folders, names and network that all hosts of one cache share."""

    def __init__(self) -> None:
        """Derive every name from the cache folder."""
        self.top = cache_dir() / "rig"
        self.hosts = self.top / "hosts"
        self.lock = self.top / "lock"
        self.key = self.top / "id_ed25519"
        self.known_hosts = self.top / "known_hosts"
        digest = hashlib.sha256(os.fsencode(os.path.realpath(self.top))).digest()
        self.ident = digest[:3].hex()
        self.net = os.environ.get("HS_RIG_NET") or f"10.203.{digest[3] % 250 + 2}"
        self.bridge = f"hsb-{self.ident}"

    # -- the base tree

    @property
    def codename(self) -> str:
        """The Debian release of this machine, which the hosts get as well."""
        release = platform.freedesktop_os_release()
        if release.get("ID") != "debian":
            raise RigError("the hosts' base tree is built from this machine's Debian mirror, and this is no Debian")
        return release["VERSION_CODENAME"]

    @property
    def base(self) -> Path:
        """The finished base tree; its name changes with the recipe."""
        recipe = [self.codename, platform.machine(), PACKAGES, MASKED_UNITS, SSHD_CONFIG, JOURNALD_CONFIG, 1]
        return self.top / f"base-{hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]}"

    def apt_sources(self) -> list[str]:
        """The mirrors that apt on this machine uses for its own release, as one-line sources."""
        wanted = {self.codename + tail for tail in ("", "-updates", "-security")}
        keyring = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
        option = f"[signed-by={keyring}] " if keyring.exists() else ""
        listing = run(
            "apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"
        )
        entries = dict.fromkeys(line.strip() for line in listing.splitlines())
        lines = [f"deb {option}{e}" for e in entries if e.split()[1:2] and e.split()[1] in wanted]
        if not lines:
            raise RigError("apt on this machine names no Debian mirror for its own release")
        return lines

    @staticmethod
    def apt_options() -> list[str]:
        """The settings of this machine's apt that decide whether its mirror can be read."""
        wanted = re.compile(r"^Acquire::(Check-Valid-Until|Check-Date|Retries|https?::(Proxy|CaInfo|Timeout)) ", re.I)
        return [f"--aptopt={line}" for line in run("apt-config", "dump").splitlines() if wanted.match(line)]

    def ensure_base(self) -> Path:
        """Build the base tree unless it is there: in a folder beside it, renamed at the very end."""
        if self.base.exists():
            return self.base
        with locked(self.top / "base.lock") as lock:
            if self.base.exists():  # someone else built it while this one waited
                return self.base
            new = self.top / "base.new"
            remove_tree(new)  # what an interrupted build left
            argv = [
                *("mmdebstrap", "--quiet", "--variant=minbase", "--include=" + ",".join(PACKAGES)),
                *(f"--dpkgopt=path-exclude=/usr/share/{d}/*" for d in ("doc", "locale", "man", "info")),
                "--dpkgopt=force-unsafe-io",
                *self.apt_options(),
                *(self.codename, str(new), *self.apt_sources()),
            ]
            # The child holds the lock too: if this process is killed, the next build waits for the child's end.
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), check=False, pass_fds=(lock,)
            )
            if done.returncode != 0:
                remove_tree(new)
                raise RigError(f"mmdebstrap: exit {done.returncode}, see its words above")
            self._prepare_base(new)
            os.sync()
            new.rename(self.base)
            with locked(self.lock):
                if not self._host_names():
                    for old in self.top.glob("base-*"):
                        if old != self.base:
                            remove_tree(old)
        return self.base

    @staticmethod
    def _prepare_base(tree: Path) -> None:
        """Make a debootstrap tree bootable and reachable over ssh."""
        for pattern in ("var/cache/apt/archives/*.deb", "var/cache/apt/*.bin", "etc/ssh/ssh_host_*", "etc/hostname"):
            for path in tree.glob(pattern):
                path.unlink()
        shutil.rmtree(tree / "var/lib/apt/lists", ignore_errors=True)
        (tree / "etc/machine-id").write_text("")  # empty: each host makes its own at its first boot
        dbus_id = tree / "var/lib/dbus/machine-id"
        dbus_id.unlink(missing_ok=True)
        dbus_id.symlink_to("/etc/machine-id")
        (tree / "etc/resolv.conf").unlink(missing_ok=True)
        (tree / "etc/resolv.conf").write_text("nameserver 127.0.0.1\n")
        for unit in MASKED_UNITS:
            link = tree / "etc/systemd/system" / unit
            link.unlink(missing_ok=True)
            link.symlink_to("/dev/null")
        for name, text in (
            ("etc/ssh/sshd_config.d/10-rig.conf", SSHD_CONFIG),
            ("etc/systemd/journald.conf.d/10-rig.conf", JOURNALD_CONFIG),
        ):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text)
        # A Python environment may be mounted somewhere below /root and be used by a service with its own account.
        (tree / "root").chmod(0o711)
        (tree / "root/.ssh").mkdir(mode=0o700, exist_ok=True)

    # -- keys and network (under the lock)

    def ensure_key(self) -> None:
        """Make the key with which the controller reaches the hosts."""
        if not self.key.exists():
            new = self.top / "key.new"
            for path in (new, new.with_suffix(".new.pub")):
                path.unlink(missing_ok=True)
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "rig", "-f", new)
            new.with_suffix(".new.pub").replace(self.key.with_suffix(".pub"))
            new.replace(self.key)

    def write_known_hosts(self) -> None:
        """List the host keys of all hosts that there are."""
        lines = []
        for name in self._host_names():
            host = Host(self, name)
            with contextlib.suppress(OSError, ValueError, KeyError):
                kind, key = host.host_key.with_suffix(".pub").read_text().split()[:2]
                lines.append(f"{host.address},{name} {kind} {key}\n")
        write_atomic(self.known_hosts, "".join(lines))

    def _host_names(self) -> list[str]:
        return sorted(p.name for p in self.hosts.iterdir()) if self.hosts.exists() else []

    def all_hosts(self) -> list[Host]:
        """Every host of which anything is there."""
        return [Host(self, name) for name in self._host_names()]

    def ensure_network(self) -> None:
        """Make the bridge, and a route that keeps the hosts' packets off every real interface."""
        if not Path("/sys/class/net", self.bridge).exists():
            taken = f"{self.net}.1/"
            if any(taken in line for line in run("ip", "-o", "-4", "addr", "show").splitlines()):
                raise RigError(f"the network {self.net}.0/24 is in use here: set HS_RIG_NET to another one")
            run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "addr", "replace", f"{self.net}.1/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        run("ip", "route", "replace", "unreachable", f"{self.net}.0/24", "metric", "9999")

    def drop_network_if_unused(self) -> None:
        """Take bridge, route and empty cgroups away with the last host."""
        if self._host_names():
            return
        run("ip", "route", "del", "unreachable", f"{self.net}.0/24", "metric", "9999", check=False)
        run("ip", "link", "del", self.bridge, check=False)
        for root in cgroup_roots():
            with contextlib.suppress(OSError):
                (root / f"hs-rig-{self.ident}").rmdir()


# ---------------------------------------------------------------------------------------------------------------------
# One host


@dataclasses.dataclass
class Options:
    """How a host was asked for; kept in its folder so that it can be started again."""

    octet: int
    bind_ro: list[str] = dataclasses.field(default_factory=list)
    overlay: list[str] = dataclasses.field(default_factory=list)
    shm: str | None = None
    disk: list[str] = dataclasses.field(default_factory=list)

    @property
    def disks(self) -> list[tuple[str, str]]:
        """(path in the host, size) of each small disk."""
        return [(word.partition("=")[0], word.partition("=")[2]) for word in self.disk]


class Host:
    """One host; every name is derived from its own, so that what is left of it can be removed without its records."""

    def __init__(self, rig: Rig, name: str) -> None:
        """Derive every name."""
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", name):
            raise RigError(f"no host name: {name}")
        self.rig, self.name = rig, name
        self.dir = rig.hosts / name
        self.root = self.dir / "root"
        self.upper = self.dir / "up"
        self.host_key = self.upper / "etc/ssh/ssh_host_ed25519_key"
        self.record = self.dir / "host.json"
        self.keeper = self.dir / "keeper.json"
        self.console = self.dir / "console.log"
        self.netns = f"hs-{rig.ident}-{name}"
        self.link = "hsv" + hashlib.sha256(self.netns.encode()).hexdigest()[:9]

    @property
    def options(self) -> Options:
        """What it was started with."""
        try:
            return Options(**json.loads(self.record.read_text()))
        except OSError:
            raise RigError(f"no such host: {self.name}") from None

    @property
    def address(self) -> str:
        """Its address on the bridge."""
        return f"{self.rig.net}.{self.options.octet}"

    @property
    def cgroups(self) -> list[Path]:
        """Its own group in each hierarchy; nothing but the host's processes is ever in there."""
        return [root / f"hs-rig-{self.rig.ident}" / self.name for root in cgroup_roots()]

    def connection(self) -> dict[str, str | int]:
        """How Ansible reaches it."""
        return {
            "name": self.name,
            "address": self.address,
            "port": 22,
            "user": "root",
            "identity_file": str(self.rig.key),
            "known_hosts": str(self.rig.known_hosts),
        }

    # -- up and down

    def up(self, options: Options) -> None:
        """Start the host afresh; whatever a former one of that name left is removed first."""
        for source in (*options.bind_ro, *options.overlay):
            if not os.path.isabs(source) or not os.path.exists(source):
                raise RigError(f"not there, so it cannot be mounted into {self.name}: {source}")
            if ":" in source or "," in source or os.path.normpath(source) in ("/", "/usr", "/etc", "/var", "/root"):
                raise RigError(f"cannot be mounted into a host: {source}")
        base = self.rig.ensure_base()
        with locked(self.rig.lock):
            self._remove()
            others = {h.name: h.options.octet for h in self.rig.all_hosts() if h.record.exists()}
            if options.octet in others.values():
                raise RigError(f"the address {self.rig.net}.{options.octet} is another host's")
            try:
                self.dir.mkdir(parents=True)
                write_atomic(self.record, json.dumps(dataclasses.asdict(options)))
                self.rig.ensure_key()
                self.rig.ensure_network()
                self._add_link()
                self._make_tree(base)
                self.rig.write_known_hosts()
                self._start()
            except BaseException:
                self._remove()
                self.rig.drop_network_if_unused()
                raise
        try:
            self.wait_for_ssh()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Stop the host and remove every trace; also of a start that was interrupted anywhere."""
        with locked(self.rig.lock):
            self._remove()
            self.rig.write_known_hosts()
            self.rig.drop_network_if_unused()

    def _remove(self) -> None:
        self._stop()
        run("ip", "link", "del", self.link, check=False)
        if Path("/run/netns", self.netns).exists():
            run("ip", "netns", "del", self.netns, check=False)
        remove_tree(self.dir)

    def _add_link(self) -> None:
        run("ip", "netns", "add", self.netns)
        run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.netns)
        run("ip", "link", "set", self.link, "master", self.rig.bridge, "up")
        run("ip", "-n", self.netns, "addr", "add", f"{self.address}/24", "dev", "eth0")
        run("ip", "-n", self.netns, "link", "set", "eth0", "up")
        run("ip", "-n", self.netns, "link", "set", "lo", "up")

    def _make_tree(self, base: Path) -> None:
        """Mount the host's own view of the base and of each overlay, and give it its name and keys."""
        (self.upper / "etc/ssh").mkdir(parents=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", self.host_key)
        mount_overlay(base, self.dir, self.upper, self.root)
        (self.root / "etc/hostname").write_text(f"{self.name}\n")
        (self.root / "etc/hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{self.address} {self.name}\n")
        authorized = self.root / "root/.ssh/authorized_keys"
        authorized.write_text(self.rig.key.with_suffix(".pub").read_text())
        authorized.chmod(0o600)
        for index, (_, size) in enumerate(
            self.options.disks
        ):  # held by this machine, so that it outlives the host's reboot
            own = self.dir / f"disk{index}"
            own.mkdir()
            run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "hs-rig", own)
        for index, source in enumerate(self.options.overlay):
            own = self.dir / f"overlay{index}"
            (own / "up").mkdir(parents=True)
            mount_overlay(Path(source), own, own / "up", own / "root")

    # -- the processes

    def _start(self) -> None:
        """Start the keeper, which starts nspawn and starts it again when the host reboots."""
        for group in self.cgroups:
            group.mkdir(parents=True, exist_ok=True)
            for level in (group.parents[1], group.parent):  # the unified hierarchy alone has this
                with contextlib.suppress(OSError):
                    (level / "cgroup.subtree_control").write_text("+memory +pids")
        with self.console.open("a") as console:
            keeper = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), "keep", self.name],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                cwd="/",
                env={**os.environ, "HS_CACHE": str(cache_dir()), "HS_RIG_NET": self.rig.net},
                start_new_session=True,
            )
        write_atomic(self.keeper, json.dumps({"pid": keeper.pid, "stamp": process_stamp(keeper.pid)}))

    def keep(self) -> int:
        """Be the keeper: run nspawn in the host's own cgroups, again and again while it asks for a reboot."""
        options = self.options
        argv = [
            *("systemd-nspawn", "--boot", "--quiet", "--register=no", "--keep-unit", "--console=read-only"),
            *(
                f"--directory={self.root}",
                f"--machine={self.name}",
                f"--network-namespace-path=/run/netns/{self.netns}",
            ),
            *("--resolv-conf=off", "--timezone=off", "--link-journal=no"),
            *(f"--bind-ro={source}" for source in options.bind_ro),
            *(f"--bind={self.dir}/overlay{i}/root:{source}" for i, source in enumerate(options.overlay)),
            *(f"--bind={self.dir}/disk{i}:{place}" for i, (place, _) in enumerate(options.disks)),
            *([f"--tmpfs=/dev/shm:size={options.shm},mode=1777"] if options.shm else []),
        ]
        files = [str(group / "cgroup.procs") for group in self.cgroups]

        def enter() -> None:
            for name in files:
                with open(name, "w") as handle:
                    handle.write("0")

        while True:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, preexec_fn=enter, check=False)
            if done.returncode != NSPAWN_WANTS_REBOOT:
                return done.returncode

    def _keeper_pid(self) -> int | None:
        """The keeper, if the process with its number is still the one that was started."""
        try:
            kept = json.loads(self.keeper.read_text())
        except (OSError, ValueError):
            return None
        return int(kept["pid"]) if kept["stamp"] and process_stamp(kept["pid"]) == kept["stamp"] else None

    def _members(self) -> set[int]:
        """The processes of the host: those in its cgroups, and so nobody else's."""
        pids: set[int] = set()
        for group in self.cgroups:
            for procs in group.glob("**/cgroup.procs"):
                with contextlib.suppress(OSError):
                    pids.update(int(line) for line in procs.read_text().split())
        return {pid for pid in pids if pid > 1 and process_stamp(pid)}

    def _stop(self) -> None:
        """Kill everything in the host's cgroups, as a power cut does, and see the keeper end with it."""
        begin = time.monotonic()
        while (members := self._members()) or self._keeper_pid():
            waited = time.monotonic() - begin
            if waited > KILL_TIMEOUT:
                raise RigError(f"processes of {self.name} do not end: {sorted(members)}")
            if waited > KILL_TIMEOUT / 4 and (keeper := self._keeper_pid()):  # it should have ended by itself
                members.add(keeper)
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.keeper.unlink(missing_ok=True)
        for group in self.cgroups:
            for folder in sorted((p for p in group.glob("**/") if p.is_dir()), key=lambda p: -len(p.parts)):
                remove_cgroup(folder)

    def leader(self) -> int:
        """The host's PID 1, as its number here."""
        for pid in self._members():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("NSpid:") and line.split()[2:] == ["1"]:
                        return pid
        raise RigError(f"{self.name} does not run")

    # -- what a test does to it

    def wait_for_ssh(self) -> None:
        """Wait until sshd speaks; the keeper's end, or too long a wait, shows the console."""
        deadline = time.monotonic() + SSH_TIMEOUT
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((self.address, 22), timeout=1) as sock:
                if sock.recv(8).startswith(b"SSH-2.0"):
                    return
            if not self._keeper_pid():
                break
            time.sleep(0.05)
        tail = self.console.read_text(errors="replace")[-3000:] if self.console.exists() else ""
        raise RigError(f"no ssh on {self.name} ({self.address}); its console:\n{tail}")

    def set_link(self, state: str) -> None:
        """Cut the host off the network ("down") or heal it ("up")."""
        run("ip", "link", "set", self.link, state)

    def signal_all(self, number: signal.Signals) -> None:
        """To every process on the host, again until no new one is there: one that was not stopped yet may have started another."""
        told: set[int] = set()
        while new := self._members() - told:
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            told |= new

    def reboot(self, *, hard: bool) -> None:
        """Restart it and wait for ssh; files are kept, /run, /tmp and /dev/shm are not."""
        if hard:
            with locked(self.rig.lock):
                self.leader()
                self._stop()
                self._start()
        else:
            leader = self.leader()
            stamp = process_stamp(leader)
            os.kill(leader, SIGRTMIN_REBOOT)
            deadline = time.monotonic() + SSH_TIMEOUT * 2
            while process_stamp(leader) == stamp:
                if time.monotonic() > deadline:
                    raise RigError(f"{self.name} does not shut down")
                time.sleep(0.05)
        self.wait_for_ssh()

    def limits(self) -> None:
        """Let the host's systemd own its memory and pids controllers; the unified hierarchy alone needs nothing."""
        if len(cgroup_roots()) == 1:
            return
        script = "for c in memory pids; do mount -o remount,bind,rw /sys/fs/cgroup/$c; done; systemctl daemon-reexec"
        run("nsenter", "--target", str(self.leader()), "--mount", "--pid", "sh", "-ec", script)


def mount_overlay(lower: Path, own: Path, upper: Path, target: Path) -> None:
    """Mount an overlay; what is written goes to upper. own is where overlayfs has its work folder."""
    work = own / "work"
    work.mkdir(exist_ok=True)
    target.mkdir(exist_ok=True)
    # The root of an overlay has the mode and owner of upper.
    shutil.copystat(lower, upper)
    os.chown(upper, lower.stat().st_uid, lower.stat().st_gid)
    run("mount", "-t", "overlay", "hs-rig", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}", target)


def remove_cgroup(folder: Path) -> None:
    """Remove an empty cgroup; the kernel may need a moment after the last process is gone."""
    for _ in range(40):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RigError(f"not removed: {folder}")


# ---------------------------------------------------------------------------------------------------------------------
# Can this machine run it?


def reason_against(rig: Rig) -> str | None:
    """One line that says why this machine cannot run the rig, or nothing."""
    if sys.platform != "linux":
        return "it needs Linux"
    if os.geteuid() != 0:
        return "it needs root (mounts, network namespaces, systemd-nspawn)"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)} (see molecule/rig/debian-packages.txt)"
    try:
        if not rig.base.exists():
            rig.apt_sources()
        rig.top.mkdir(parents=True, exist_ok=True)
        _try_overlay(rig.top)
        _try_network(rig.ident)
        _try_cgroups(rig.ident)
    except (RigError, OSError) as error:
        return " ".join(str(error).split())
    return None


def _try_overlay(folder: Path) -> None:
    probe = Path(tempfile.mkdtemp(prefix="check.", dir=folder))
    try:
        for name in ("lower", "up"):
            (probe / name).mkdir()
        mount_overlay(probe / "lower", probe, probe / "up", probe / "root")
        (probe / "root/file").write_text("")
    finally:
        remove_tree(probe)


def _try_network(ident: str) -> None:
    netns, bridge, link = f"hs-{ident}-check{os.getpid()}", f"hsc{os.getpid()}", f"hsd{os.getpid()}"
    try:
        run("ip", "netns", "add", netns)
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", netns)
    finally:
        for argv in (("link", "del", link), ("link", "del", bridge), ("netns", "del", netns)):
            run("ip", *argv, check=False)


def _try_cgroups(ident: str) -> None:
    roots = cgroup_roots()
    if not roots:
        raise RigError("no cgroup hierarchy is mounted in /sys/fs/cgroup")
    for root in roots:
        probe = root / f"hs-rig-{ident}-check{os.getpid()}"
        probe.mkdir()
        probe.rmdir()


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("check", help="exit 3 with one line if this machine cannot run it")
    verbs.add_parser("base", help="build the base tree")
    verbs.add_parser("cache", help="print the cache folder")
    up = verbs.add_parser("up", help="start a host")
    up.add_argument("name")
    up.add_argument("octet", type=int, choices=range(2, 255), metavar="OCTET", help="last part of its address, 2-254")
    up.add_argument(
        "--bind-ro", action="append", default=[], metavar="SRC", help="mount SRC at the same path, read-only"
    )
    up.add_argument(
        "--overlay", action="append", default=[], metavar="SRC", help="mount SRC at the same path, changes stay private"
    )
    up.add_argument("--disk", action="append", default=[], metavar="PATH=SIZE", help="a small disk of its own at PATH")
    up.add_argument("--shm", metavar="SIZE", help="size of its /dev/shm, such as 64M")
    down = verbs.add_parser("down", help="stop a host and remove every trace of it")
    which = down.add_mutually_exclusive_group(required=True)
    which.add_argument("name", nargs="?")
    which.add_argument("--all", action="store_true")
    for verb, words in (
        ("cut", "take its network link away"),
        ("heal", "give it back and wait for ssh"),
        ("pause", "stop all that runs on it, and its link: a host that is lost"),
        ("resume", "have both go on, and wait for ssh"),
        ("limits", "have MemoryMax= and TasksMax= enforced inside"),
        ("show", "print its connection"),
        ("keep", "(internal) be the keeper of a host"),
    ):
        verbs.add_parser(verb, help=words).add_argument("name")
    reboot = verbs.add_parser("reboot", help="restart a host")
    reboot.add_argument("name")
    reboot.add_argument("--hard", action="store_true", help="as a power cut does")
    return parser.parse_args(argv)


def act(args: argparse.Namespace, rig: Rig) -> int:
    """Carry out one verb."""
    if args.verb == "check":
        if reason := reason_against(rig):
            print(f"this machine cannot run the test hosts: {reason}")
            return EXIT_CANNOT_RUN
        return 0
    if args.verb == "cache":
        print(cache_dir())
        return 0
    if args.verb == "base":
        print(rig.ensure_base())
        return 0
    if args.verb == "down" and args.all:
        for each in rig.all_hosts():
            each.down()
        with locked(rig.lock):
            rig.drop_network_if_unused()
        return 0
    host = Host(rig, args.name)
    if args.verb == "keep":
        return host.keep()
    if args.verb == "up":
        host.up(Options(args.octet, args.bind_ro, args.overlay, args.shm, args.disk))
    elif args.verb == "down":
        host.down()
    elif args.verb in ("cut", "heal"):
        host.set_link("down" if args.verb == "cut" else "up")
        if args.verb == "heal":
            host.wait_for_ssh()
    elif args.verb == "pause":
        host.set_link("down")
        host.signal_all(signal.SIGSTOP)
    elif args.verb == "resume":
        host.signal_all(signal.SIGCONT)
        host.set_link("up")
        host.wait_for_ssh()
    elif args.verb == "reboot":
        host.reboot(hard=args.hard)
    elif args.verb == "limits":
        host.limits()
    if args.verb in ("up", "show"):
        print(json.dumps(host.connection()))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and turn an error into one message."""
    args = parse(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # leave through the clean-up code
        signal.signal(number, lambda caught, _frame: sys.exit(128 + caught))
    try:
        return act(args, Rig())
    except RigError as error:
        print(f"rig.py {args.verb}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

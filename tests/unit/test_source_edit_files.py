"""What an edit does to the file as a file: links, attributes, mounts, other users, other writers, sudden death."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from sglang_hs import source_edit, source_edit_files
from sglang_hs.source_edit import EditRefused
from source_edit_helpers import MODEL, Place, as_nobody, in_child, variant

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.fixture
def open_root():
    """A folder that other users can enter (pytest's own they cannot)."""
    root = Path(tempfile.mkdtemp(prefix="source-edit-"))
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)


def refusal(call, reason):
    with pytest.raises(EditRefused) as caught:
        call()
    assert caught.value.reason == reason, str(caught.value)
    return str(caught.value)


def command(*argv):
    """Run a tool of the system; skip the test where it is missing or not allowed."""
    if shutil.which(argv[0]) is None:
        pytest.skip("{} is not installed".format(argv[0]))
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("{}: {}".format(" ".join(argv), done.stderr.strip()))


@contextlib.contextmanager
def attribute(letter, path):
    command("chattr", "+" + letter, str(path))
    try:
        yield
    finally:
        subprocess.run(["chattr", "-" + letter, str(path)], check=True)


@contextlib.contextmanager
def mounted(*argv):
    command("mount", *argv)
    try:
        yield
    finally:
        subprocess.run(["umount", argv[-1]], check=True)


# -- links and kinds of files ------------------------------------------------------------------------------------------


def test_a_symlink_stays_one_and_its_target_is_edited(place):  # 12, 13
    link = place.root / "link.py"
    link.symlink_to(place.file)
    result = source_edit.apply(source_edit.plan(str(link), [variant()], str(place.backup)))
    assert result["real_path"] == str(place.file)
    assert link.is_symlink()
    assert b"hooked" in place.read()
    assert Path(result["backup"]).read_bytes() == MODEL
    assert not Path(result["backup"]).is_symlink()
    # The same file by its own name.
    assert not place.present()["changed"]
    source_edit.undo(str(link), str(place.backup))
    assert link.is_symlink()
    assert place.read() == MODEL


def test_a_linked_folder_and_compiled_copies_on_both_ways(place):
    alias = place.root / "alias"
    alias.symlink_to(place.file.parent)
    cache = place.file.parent / "__pycache__"
    cache.mkdir()
    for name in ("model.cpython-311.pyc", "model.cpython-38.opt-1.pyc", "model_two.cpython-311.pyc"):
        (cache / name).write_bytes(b"old")
    source_edit.apply(source_edit.plan(str(alias / "model.py"), [variant()], str(place.backup)))
    assert os.listdir(cache) == ["model_two.cpython-311.pyc"]


def test_a_link_that_leads_nowhere_or_in_circles_is_refused(place):
    place.file.unlink()
    place.file.symlink_to(place.root / "nowhere.py")
    refusal(place.plan, "missing")
    place.file.unlink()
    place.file.symlink_to(place.file)
    with pytest.raises(EditRefused):
        place.plan()


def test_a_hard_link_is_edited_alone_and_the_result_says_so(place):  # 14, 15
    other = place.root / "installer-cache.py"
    os.link(place.file, other)
    result = place.present()
    assert "2 names" in result["notes"][0]
    assert other.read_bytes() == MODEL
    assert b"hooked" in place.read()
    place.undo()
    assert place.read() == other.read_bytes() == MODEL


@pytest.mark.parametrize("kind", ["folder", "fifo", "device"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "model.py"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)  # opening it would wait for ever
    else:
        path = Path("/dev/zero")
    refusal(lambda: source_edit.plan(str(path), [variant()], str(tmp_path / "backup")), "not_a_file")


def test_a_missing_file_or_folder_is_refused_by_the_plan_already(place):  # 27, 28
    place.file.unlink()
    refusal(place.plan, "missing")
    place.file.parent.rmdir()
    refusal(place.plan, "missing")
    assert not place.backup.exists()


def test_a_huge_file_is_refused(place):
    os.truncate(place.file, source_edit_files.MAX_BYTES + 1)
    refusal(place.plan, "too_large")


# -- attributes --------------------------------------------------------------------------------------------------------


def posix_acl(user):
    """An ACL that lets one more user read, as the kernel stores it."""
    entries = [(1, 6, -1), (2, 4, user), (4, 4, -1), (0x10, 4, -1), (0x20, 0, -1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)


def set_xattr(path, name, value):
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        pytest.skip("{}: {}".format(name, error.strerror))


def attributes(path):
    info = os.stat(path)
    names = os.listxattr(path)
    return (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode), {name: os.getxattr(path, name) for name in names})


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o444, 0o4755, 0o640])
def test_mode_is_kept_both_ways(place, mode):
    place.file.chmod(mode)
    place.present()
    assert stat.S_IMODE(os.stat(place.file).st_mode) == mode
    place.undo()
    assert stat.S_IMODE(os.stat(place.file).st_mode) == mode


@needs_root
def test_owner_and_mode_of_file_and_backup_are_the_original_s(place):  # 18
    os.chown(place.file, 65534, 65533)
    place.file.chmod(0o640)
    result = place.present()
    assert attributes(place.file)[:3] == (65534, 65533, 0o640)
    assert attributes(result["backup"])[:3] == (65534, 65533, 0o640)
    assert os.stat(result["backup"]).st_mtime_ns == 10**18
    assert stat.S_IMODE(os.stat(place.backup).st_mode) == 0o700
    place.undo()
    assert attributes(place.file)[:3] == (65534, 65533, 0o640)


def test_an_acl_is_kept(place):  # 21
    set_xattr(place.file, "system.posix_acl_access", posix_acl(65534))
    before = attributes(place.file)
    place.present()
    assert attributes(place.file) == before
    place.undo()
    assert attributes(place.file) == before


def test_a_folder_s_default_acl_does_not_reach_the_edited_file(place):
    set_xattr(place.file.parent, "system.posix_acl_default", posix_acl(65534))
    before = attributes(place.file)
    place.present()
    assert attributes(place.file) == before


@pytest.mark.parametrize("name", ["user.note", "security.selinux", "trusted.mark"])
def test_a_label_or_other_extended_attribute_is_kept(place, name):  # 22
    set_xattr(place.file, name, b"system_u:object_r:lib_t:s0\0")
    before = attributes(place.file)
    place.present()
    assert attributes(place.file) == before
    place.undo()
    assert attributes(place.file) == before


def test_an_attribute_that_cannot_be_kept_refuses_the_edit(place, monkeypatch):
    set_xattr(place.file, "user.note", b"1")

    def denied(*_args, **_more):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setxattr", denied)
    assert "user.note" in refusal(place.present, "attribute_lost")
    assert place.read() == MODEL
    assert place.beside() == []


def test_mtime_moves_on_by_a_whole_second_and_comes_back(place):  # 20
    now = time.time_ns()
    os.utime(place.file, ns=(now, now))
    place.present()
    patched = os.stat(place.file).st_mtime_ns
    assert patched // 10**9 != now // 10**9
    place.present([variant(lines=["self.other = 1"])])
    assert os.stat(place.file).st_mtime_ns // 10**9 not in (now // 10**9, patched // 10**9)
    place.undo()
    assert os.stat(place.file).st_mtime_ns == now


# -- obstacles ---------------------------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("letter", ["i", "a"])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_an_immutable_file_or_folder_is_refused_by_name(place, letter, what):  # 23
    target = place.file if what == "file" else place.file.parent
    with attribute(letter, target):
        message = refusal(place.plan, "not_replaceable")
        assert "chattr -{} '{}'".format(letter, target) in message
        assert place.inspect()["state"] == "pristine"
    assert place.read() == MODEL
    place.present()
    with attribute(letter, target):
        refusal(place.undo, "not_replaceable")
        assert place.inspect()["state"] == "patched"


@needs_root
def test_a_bind_mounted_file_is_refused(place):  # 26
    outside = place.root / "a file outside.py"
    outside.write_bytes(MODEL)
    with mounted("--bind", str(outside), str(place.file)):
        assert "mount point" in refusal(place.plan, "not_replaceable")
    # Found out by the rename only, where /proc does not tell.
    plan = place.plan()
    with mounted("--bind", str(outside), str(place.file)):
        with pytest.raises(EditRefused) as caught:
            source_edit.apply(plan)
        assert caught.value.reason == "os_error", str(caught.value)
        assert place.beside() == []
    assert outside.read_bytes() == MODEL


@needs_root
def test_a_bind_mounted_folder_works(place):  # 26
    with mounted("--bind", str(place.file.parent), str(place.file.parent)):
        assert place.present()["changed"]
        place.undo()
    assert place.read() == MODEL


@needs_root
def test_a_read_only_file_system_is_refused_and_a_full_one_leaves_the_file(tmp_path):
    root = tmp_path / "mnt"
    root.mkdir()
    backup = str(tmp_path / "backup")
    with mounted("-t", "tmpfs", "-o", "size=64k", "none", str(root)):
        file = root / "model.py"
        file.write_bytes(MODEL)
        with contextlib.suppress(OSError):
            (root / "filler").write_bytes(b"x" * 2**20)
        message = refusal(lambda: source_edit.apply(source_edit.plan(str(file), [variant()], backup)), "os_error")
        assert "No space left" in message
        assert file.read_bytes() == MODEL
        assert sorted(os.listdir(root)) == ["filler", "model.py"]
        command("mount", "-o", "remount,ro", str(root))
        assert "cannot be written" in refusal(
            lambda: source_edit.plan(str(file), [variant()], backup), "not_replaceable"
        )


def test_a_memory_file_system_works_with_the_backup_on_another(tmp_path):
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = Path(folder) / "model.py"
        file.write_bytes(MODEL)
        assert source_edit.apply(source_edit.plan(str(file), [variant()], str(tmp_path / "b")))["changed"]
        source_edit.undo(str(file), str(tmp_path / "b"))
        assert file.read_bytes() == MODEL


@needs_root
def test_a_writable_file_in_a_folder_that_is_not_is_refused(open_root):  # 25
    place = Place(open_root)
    os.chown(place.file, 65534, 65534)
    place.file.chmod(0o666)
    place.backup = open_root / "theirs" / "backup"
    place.backup.parent.mkdir()
    os.chown(place.backup.parent, 65534, 65534)
    assert as_nobody(lambda: place.present()["changed"]) == "refused not_replaceable"
    assert "rename" in as_nobody(lambda: [str(error) for error in _caught(place.plan)])
    assert place.read() == MODEL


def _caught(call):
    try:
        call()
    except EditRefused as error:
        yield error


@needs_root
def test_another_user_s_file_is_not_taken_over(open_root):
    place = Place(open_root)
    place.file.chmod(0o666)
    place.file.parent.chmod(0o777)
    open_root.chmod(0o777)
    assert "change its owner" in as_nobody(lambda: [str(error) for error in _caught(place.plan)])
    assert attributes(place.file)[0] == 0


@needs_root
def test_an_ordinary_user_can_edit_and_undo_own_files(open_root):
    os.chown(open_root, 65534, 65534)
    place = Place(open_root)
    for path in (place.file, place.file.parent):
        os.chown(path, 65534, 65534)
    place.file.chmod(0o444)
    assert as_nobody(lambda: place.present()["changed"]) == "True"
    assert b"hooked" in place.read()
    # Root undoes what the user did, the owner stays.
    place.undo()
    assert place.read() == MODEL
    assert attributes(place.file)[:3] == (65534, 65534, 0o444)


@needs_root
def test_an_unreadable_file_and_an_unwritable_backup_folder_are_refused_in_words(open_root):
    os.chown(open_root, 65534, 65534)
    place = Place(open_root)
    os.chown(place.file, 65534, 65534)
    os.chown(place.file.parent, 65534, 65534)
    place.file.chmod(0)
    assert as_nobody(place.plan) == "refused os_error"
    place.file.chmod(0o644)
    place.backup = Path("/source-edit-test/backup")
    assert as_nobody(place.plan) == "refused not_replaceable"


@needs_root
def test_compiled_copies_that_cannot_be_removed_refuse_the_edit(open_root):
    os.chown(open_root, 65534, 65534)
    place = Place(open_root)
    for path in (place.file, place.file.parent):
        os.chown(path, 65534, 65534)
    cache = place.file.parent / "__pycache__"
    cache.mkdir()
    (cache / "model.cpython-311.pyc").write_bytes(b"old")
    assert as_nobody(place.plan) == "refused not_replaceable"


# -- the backup folder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["lib", "lib/sub", "env/site-packages/x", "package/backup", "lib/__pycache__"])
def test_a_backup_folder_in_a_package_is_refused_and_nothing_lies_beside_the_source(place, where):  # 19
    package = place.root / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    place.backup = place.root / where
    assert "inside a Python package" in refusal(place.plan, "backup_dir")
    place.backup = place.root / "fine"
    place.present()
    assert place.beside() == []


def test_a_backup_folder_that_others_can_write_or_that_is_none_is_refused(place):
    place.backup.mkdir()
    place.backup.chmod(0o777)
    assert "other users" in refusal(place.plan, "backup_dir")
    place.backup.rmdir()
    place.backup.touch()
    assert "not a folder" in refusal(place.plan, "backup_dir")
    refusal(lambda: source_edit.plan(str(place.file), [variant()], "backup"), "backup_dir")


def test_an_undo_does_without_a_backup_folder_that_it_cannot_trust(place):
    place.present()
    place.backup.chmod(0o777)
    result = place.undo()
    assert place.read() == MODEL
    assert "was not used" in result["notes"][0]
    assert len(place.kept()) == 2


def test_a_backup_is_never_overwritten(place):  # 17
    name = Path(place.plan().backup)
    place.backup.mkdir(mode=0o700)
    name.write_bytes(b"somebody's")
    second = place.present()["backup"]
    assert name.read_bytes() == b"somebody's"
    assert Path(second).read_bytes() == MODEL
    assert second != str(name)
    # Files of the same name in two folders do not meet either.
    other = Place(place.root / "other", MODEL + b"# other\n")
    other.backup = place.backup
    other.present()
    place.undo()
    other.undo()
    assert place.read() == MODEL
    assert other.read() == MODEL + b"# other\n"


def test_the_record_is_readable_by_its_owner_only(place):
    place.present()
    (record,) = place.backup.glob("*.json")
    assert stat.S_IMODE(os.stat(record).st_mode) == 0o600


# -- other writers -----------------------------------------------------------------------------------------------------


def test_a_change_between_plan_and_apply_is_not_lost(place):  # 16
    plan = place.plan()
    place.file.write_bytes(MODEL + b"theirs = 1\n")
    refusal(lambda: source_edit.apply(plan), "changed_meanwhile")
    assert place.read() == MODEL + b"theirs = 1\n"
    assert place.beside() == []


@pytest.mark.parametrize("how", ["write", "replace"])
def test_a_change_in_the_last_moment_before_the_rename_is_not_lost(place, monkeypatch, how):  # 16
    real_utime = os.utime
    changed = MODEL + b"theirs = 1\n"

    def late(path, *args, **more):
        real_utime(path, *args, **more)
        if str(path).endswith(".tmp") and str(path).startswith(str(place.file.parent)):
            if how == "write":
                place.file.write_bytes(changed)
            else:  # the same bytes in another file
                shutil.copy2(place.file, place.root / "copy")
                os.replace(place.root / "copy", place.file)

    monkeypatch.setattr(os, "utime", late)
    refusal(place.present, "changed_meanwhile")
    monkeypatch.undo()
    assert place.read() == (changed if how == "write" else MODEL)
    assert place.beside() == []


def test_a_second_caller_with_the_same_plan_finds_it_done(place):
    first, second = place.plan(), place.plan()
    assert source_edit.apply(first)["changed"]
    result = source_edit.apply(second)
    assert not result["changed"]
    assert result["state_before"] == "patched"
    once, twice = (source_edit.plan(str(place.file), None, str(place.backup), state="absent") for _ in range(2))
    assert source_edit.apply(once)["changed"]
    assert not source_edit.apply(twice)["changed"]
    assert place.read() == MODEL


def _at_once(works):
    """Run each of ``works`` in a process of its own, all beginning at one time; their answers as text, in order."""
    start = time.time() + 0.3
    children = []
    for work in works:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            time.sleep(max(0.0, start - time.time()))
            try:
                answer = str(work())
            except source_edit.EditRefused as error:
                answer = "refused " + error.reason
            except BaseException as error:
                answer = repr(error)
            os.write(write, answer.encode())
            os._exit(0)
        os.close(write)
        children.append((child, read))
    answers = []
    for child, read in children:
        with os.fdopen(read) as handle:
            answers.append(handle.read())
        os.waitpid(child, 0)
    return answers


def test_of_eight_appliers_at_once_exactly_one_changes_the_file(place):
    answers = _at_once([lambda: place.present()["changed"]] * 8)
    assert sorted(answers) == ["False"] * 7 + ["True"]
    place.undo()
    assert place.read() == MODEL


def test_two_operators_who_want_different_things_at_once_leave_what_one_of_them_wants(place):
    other = [variant(lines=["self.other = 1"])]
    wanted = [place.plan().after, place.plan(other).after, MODEL]
    for number in range(12):
        works = [
            lambda: place.present()["changed"],
            lambda: place.present(other)["changed"],
            lambda: place.undo()["changed"],
        ]
        answers = _at_once(works[number % 3 :] + works[: number % 3])
        assert set(answers) <= {"True", "False", "refused changed_meanwhile"}, answers
        assert place.read() in wanted
        assert place.beside() == []
        place.undo()
        assert place.read() == MODEL
        assert os.stat(place.file).st_mtime_ns == 10**18
        assert place.kept() == []


def test_a_lock_that_is_held_is_waited_for_and_then_named(place, monkeypatch):
    handle = os.open(place.file.parent, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    monkeypatch.setattr(source_edit_files, "LOCK_WAIT_S", 0.2)
    try:
        assert str(place.file.parent) in refusal(place.present, "locked")
    finally:
        os.close(handle)
    assert place.read() == MODEL
    assert place.present()["changed"]


def test_a_git_checkout_is_clean_after_the_undo(place):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    folder = str(place.file.parent)
    environment = {"PATH": os.environ["PATH"], "HOME": str(place.root), "GIT_CONFIG_NOSYSTEM": "1"}

    def git(*argv):
        full = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", folder, *argv]
        return subprocess.run(full, env=environment, capture_output=True, text=True, check=True).stdout

    git("init", "-q")
    git("add", "model.py")
    git("commit", "-q", "-m", "a")
    place.present()
    assert git("status", "--short") == " M model.py\n"
    place.undo()
    assert git("status", "--short", "--ignored") == ""


# -- sudden death ------------------------------------------------------------------------------------------------------


def _die_at_line(number, work):
    """Run ``work`` and kill the process before the ``number``-th line of the program that it comes to."""
    left = itertools.count(1)
    folder = os.path.dirname(source_edit.__file__)

    def trace(frame, event, _argument):
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line" and next(left) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    try:
        return work()
    finally:
        sys.settrace(None)


@pytest.fixture
def fast_root(tmp_path):
    """A folder in memory where there is one: these tests wait for the disk hundreds of times otherwise."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["apply", "undo", "reapply"])
def test_killed_before_any_line_the_file_is_whole_and_the_next_run_finishes(fast_root, what):
    edit, other = [variant()], [variant(lines=["self.other = 1"])]
    kills = 0
    for number in itertools.count(1):
        place = Place(fast_root / str(number))
        if what != "apply":
            place.present(other if what == "reapply" else edit)
        before = place.read()
        # The deciding reads only: the kill is in what follows.
        state = "absent" if what == "undo" else "present"
        plan = source_edit.plan(str(place.file), edit, str(place.backup), state=state)
        end = in_child(lambda n=number, p=plan: _die_at_line(n, lambda: source_edit.apply(p)["changed"]))
        assert place.read() in (before, plan.after), number
        if end != "killed":
            assert end == "True", end
            break
        kills += 1
        if what == "undo":
            place.undo()
        else:
            place.present(edit)
            assert place.read() == plan.after
            assert place.beside() == [], number
            place.undo()
        assert place.read() == MODEL, number
        assert os.stat(place.file).st_mtime_ns == 10**18, number
        assert place.beside() == [], number
        assert place.kept() == [], number
        shutil.rmtree(fast_root / str(number))
    assert kills > 50


@pytest.mark.slow
def test_readers_see_only_whole_files_while_it_is_patched_and_undone(fast_root):
    place = Place(fast_root)
    patched = place.plan().after
    stop = place.root / "stop"

    def reader():
        seen = set()
        while not stop.exists():
            data = place.read()
            if data not in (MODEL, patched):
                return "half: {!r}".format(data[:80])
            compile(data, "model.py", "exec")
            seen.add(data == patched)
        return sorted(seen)

    child_read, child_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(child_write, str(reader()).encode())
        os._exit(0)
    for _round in range(50):
        place.present()
        place.undo()
    stop.touch()
    os.close(child_write)
    with os.fdopen(child_read) as handle:
        assert handle.read() in ("[False, True]", "[False]", "[True]")
    os.waitpid(child, 0)

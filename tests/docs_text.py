"""The commands and code blocks of README.md and docs/*.md, as printed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
PROGRAMS = (
    "ansible ansible-doc ansible-inventory ansible-playbook bash cat chmod cp curl df docker export find grep journalctl kill ls make mv nvidia-smi"
    " pgrep pip ps python python3 rm scp sed setsid specforge ss ssh sudo systemctl tail torchrun watch /var/lib/sglang-hs/hs"
    " .venv/bin/python /opt/sglang/bin/python"
).split()


class Command(NamedTuple):
    """A command, and where it is printed."""

    text: str
    page: str
    line: int


class Block(NamedTuple):
    """A fenced block: its language, and the name in its first line (a comment; empty where it has none)."""

    language: str
    name: str
    text: str
    page: str


def program(words: str) -> str:
    """The program that a line of shell starts, without the variables before it."""
    for word in words.split():
        if not re.match(r"[A-Za-z_]+=", word):
            return word
    return ""


def _lines(text: str) -> Iterator[tuple[int, str, str]]:
    """(number, line, language of the fence around it or empty)."""
    language = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            language = "" if language else (line.strip().strip("`") or "text")
            continue
        yield number, line, language


def _bare(line: str) -> str:
    """A line of shell without the prompt, and without what is said about it behind two spaces and a hash."""
    return re.sub(r" {2,}# .*", "", line.strip().removeprefix("$ "))


def commands() -> list[Command]:
    """Every command: indented lines, fenced shell, and inline code that begins with a program and says more than its name."""
    found = []
    for page in PAGES:
        for number, line, language in _lines(page.read_text()):
            if language:
                if language in ("sh", "bash", "console", "shell"):
                    found.append(Command(_bare(line), page.name, number))
            elif line.startswith("    "):
                found.append(Command(_bare(line), page.name, number))
            else:
                inline = re.findall(r"(?<!`)`([^`]+)`(?!`)", line)
                found += [Command(words, page.name, number) for words in inline if is_command(words)]
    return found


def is_command(words: str) -> bool:
    """Whether inline code is a command with arguments, not the name of a program or a path."""
    return program(words) in PROGRAMS and len(words.split()) > 1


def blocks() -> list[Block]:
    """Every fenced block."""
    found = []
    for page in PAGES:
        for match in re.finditer(r"(?m)^```(\w+)\n(.*?)^```", page.read_text(), re.S):
            name = re.match(r"# (\S+)\n", match.group(2))
            found.append(Block(match.group(1), name.group(1) if name else "", match.group(2), page.name))
    return found


def block(name: str) -> str:
    """The text of the block of that name."""
    (found,) = [block.text for block in blocks() if block.name == name]
    return found

"""The extraction server's command line, made from production's own.

Production's arguments, minus what spoils a capture, plus what a capture needs - each flag checked against the options that
the *installed* release prints, and a renamed one taken under its new name. Pure functions; nothing here touches a host.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .errors import HsError


class Option(NamedTuple):
    """One option as typed: ``--name`` with its values (a ``--name=value`` is split)."""

    name: str
    values: Tuple[str, ...]


# Taken off production's arguments, with their values. Why, group by group:
DROP = (
    # a draft model's forwards are not the target's, and a verify step is no prefill
    r"--speculative-.*", r"--decoupled-spec-.*", r"--enable-multi-layer-eagle",
    # decode speed: an extraction decodes one token a prompt
    r"--num-continuous-decode-steps",
    # replayed graphs run no Python, so no hook
    r"--cuda-graph-.*", r"--enable-.*cuda-graph.*", r"--enable-torch-compile", r"--torch-compile-.*", r"--enable-profile-cuda-graph",
    # "enforce" undoes the flag that disables it (0.5.10)
    r"--enforce-piecewise-cuda-graph", r"--piecewise-cuda-graph-.*", r"--debug-cuda-graph",
    # batches cut or mixed in ways that split a prompt over forwards, or skip the model's own loop
    r"--chunked-prefill-size", r"--enable-mixed-chunk", r"--enable-dynamic-chunking", r"--enable-two-batch-overlap", r"--tbo-.*",
    r"--enable-single-batch-overlap",
    # a cached prefix is not computed again: its states would be missing
    r"--enable-hierarchical-cache", r"--hicache-.*", r"--radix-.*", r"--enable-session-radix-cache",
    # these refuse to start without the prefix cache
    r"--enable-lmcache", r"--lmcache-.*", r"--enable-unified-cache-.*", r"--unified-cache-.*", r"--enable-flexkv", r"--flexkv-.*",
    # a prompt cut short without a word
    r"--allow-auto-truncate",
    # how prompts are put together is set by us below
    r"--max-prefill-tokens", r"--prefill-max-requests",
    # set by us below
    r"--attention-backend", r"--prefill-attention-backend", r"--decode-attention-backend", r"--max-running-requests", r"--host", r"--port",
    # loopback only: keys and certificates have no use there, and would stand in a command line
    r"--api-key", r"--admin-api-key", r"--ssl-.*", r"--enable-ssl-.*",
    # states leave by file, never as JSON floats; the second (0.5.23) does not start without a draft algorithm
    r"--enable-return-hidden-states", r"--enable-return-aux-hidden-states", r"--return-(?:aux-)?hidden-states?-.*",
    # a second front
    r"--tokenizer-worker-num", r"--smg-.*", r"--grpc-mode",
)  # fmt: skip

# Where several prompts may share a forward: how many at most, and how many may be at the server, so that the next forward's are there
# when one ends.
PROMPTS_PER_FORWARD = 64
PROMPTS_IN_FLIGHT = 2 * PROMPTS_PER_FORWARD

Needs = Tuple[Tuple[str, Tuple[Tuple[str, ...], ...], bool], ...]

ALONE: Needs = (("one prompt in a forward", (("--max-running-requests", "1"),), True),)

# What a capture needs: (why, alternatives - the first whose flags the release knows is taken, must it be there).
NEED: Needs = (
    ("no prefix taken from a cache", (("--disable-radix-cache",),), True),
    ("a prompt is one forward", (("--chunked-prefill-size", "-1"),), True),
    ("no CUDA graph in decode", (("--disable-cuda-graph",), ("--cuda-graph-backend-decode", "disabled")), True),
    # the prefill graph came later and changed its name twice; where none of these is known there is none to disable
    (
        "no CUDA graph in prefill",
        (
            ("--disable-prefill-cuda-graph",),
            ("--cuda-graph-backend-prefill", "disabled"),
            ("--disable-piecewise-cuda-graph",),
        ),
        False,
    ),
)

# Layouts in which the tokens of a prompt are scattered over ranks: refused, with what to look at.
REFUSE = (
    ({"--pp-size", "--pipeline-parallel-size"}, "1", "pipeline parallel: the layers live in several processes"),
    ({"--dp-size", "--data-parallel-size", "--dp"}, "1", "data parallel: prompts are spread over replicas"),
    (
        {"--attn-cp-size", "--context-parallel-size", "--attention-context-parallel-size"},
        "1",
        "context parallel: a prompt is spread over ranks",
    ),
    ({"--nnodes"}, "1", "several nodes: the other nodes are not in this inventory"),
    ({"--moe-a2a-backend"}, "none", "all-to-all experts: tokens are scattered over ranks"),
    ({"--disaggregation-mode"}, "null", "disaggregated prefill and decode"),
)
REFUSE_FLAGS = {
    "--enable-dp-attention": "data-parallel attention: tokens are scattered over ranks",
    "--enable-deepep-moe": "all-to-all experts: tokens are scattered over ranks",
    "--enable-nsa-prefill-context-parallel": "context parallel: a prompt is spread over ranks",
    "--enable-dsa-prefill-context-parallel": "context parallel: a prompt is spread over ranks",
    "--enable-prefill-context-parallel": "context parallel: a prompt is spread over ranks",
    "--enable-prefill-cp": "context parallel: a prompt is spread over ranks",
}

_MODEL = ("--model-path", "--model")
_TP = ("--tp-size", "--tensor-parallel-size", "--tp")


def split(argv: Sequence[str]) -> Tuple[List[str], List[Option]]:
    """``argv`` as (interpreter and entry point, options). Values are all words up to the next ``--``; ``-1`` is a value."""
    head: List[str] = []
    options: List[Option] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            options.append(Option(name, (value,) if equals else ()))
        elif options:
            options[-1] = Option(options[-1].name, options[-1].values + (word,))
        else:
            head.append(word)
    return head, options


def value(argv: Sequence[str], *names: str) -> Optional[str]:
    """The last value given to any of ``names``, as argparse would take it; None when absent."""
    found = [option.values[0] for option in split(argv)[1] if option.name in names and option.values]
    return found[-1] if found else None


def model_path(argv: Sequence[str]) -> Optional[str]:
    """--model-path of a server's command line."""
    return value(argv, *_MODEL)


def tensor_parallel(argv: Sequence[str]) -> int:
    """--tp-size of a server's command line; 1 when not given."""
    return int(value(argv, *_TP) or 1)


def refuse_unsafe(argv: Sequence[str]) -> None:
    """HsError when production is laid out in a way that the capture does not understand."""
    _, options = split(argv)
    for option in options:
        if option.name == "--config":  # from 0.5.3; what stands there could be any of those below
            raise HsError(
                "production takes options from a file ({}), which is not read here".format(" ".join(option.values)),
                "everything: production was not touched",
                "name --config in hs_drop_arguments, and in hs_extra_arguments what the extraction needs of it "
                "(--model-path and --tp-size at least)",
            )
    for names, harmless, why in REFUSE:
        for option in options:
            if option.name in names and option.values and option.values[0] != harmless:
                raise _unsafe(" ".join((option.name,) + option.values), why)
    for option in options:
        if option.name in REFUSE_FLAGS and option.values in ((), ("true",), ("True",)):
            raise _unsafe(option.name, REFUSE_FLAGS[option.name])


def _unsafe(shown: str, why: str) -> HsError:
    return HsError(
        "production runs with {} - {}; states captured there would be wrong".format(shown, why),
        "everything: production was not touched",
        "run the extraction on a host whose server uses tensor parallelism alone, or name the flag in hs_drop_arguments if it is safe to go without it",
    )


def extraction(
    argv: Sequence[str],
    flags: Set[str],
    port: int,
    attention_backend: str,
    drop: Sequence[str] = (),
    extra: Sequence[str] = (),
    tokens_per_forward: int = 0,
) -> List[str]:
    """The extraction server's argv from production's ``argv``.

    ``flags``: option names that the installed release knows (empty: not known, take the first name of each).
    ``tokens_per_forward``: prompts share a forward up to this many tokens; 0: each has one to itself.
    ``drop``: more option names to take off (regular expressions); ``extra``: words added at the end.
    Raises HsError for a layout that cannot be captured, or a release without a flag that a capture cannot do without.
    """
    unwanted = re.compile("|".join("(?:{})".format(pattern) for pattern in (*DROP, *drop)))
    head, options = split(argv)
    options = [Option(spelt_out(name, flags), values) for name, values in options]
    added = set(name for name, _ in split(list(extra))[1])
    unknown = sorted(added - flags) if flags else []
    if unknown:
        raise HsError(
            "the installed SGLang knows no option {}".format(", ".join(unknown)),
            "everything: production was not touched",
            "correct hs_extra_arguments; `python -m sglang.launch_server --help` lists what there is",
        )
    kept = [option for option in options if not unwanted.fullmatch(option.name) and option.name not in added]
    command = list(head)
    for option in kept:
        command += [option.name, *option.values]
    refuse_unsafe([*command, *extra])
    command += ["--host", "127.0.0.1", "--port", str(port), "--attention-backend", attention_backend]
    present = {option.name for option in kept} | added
    for why, alternatives, required in (together(tokens_per_forward) if tokens_per_forward else ALONE) + NEED:
        choice = _known(alternatives, flags)
        if choice is None:
            if required:
                raise HsError(
                    "the installed SGLang knows none of {} ({})".format(
                        ", ".join(words[0] for words in alternatives), why
                    ),
                    "everything: production was not touched",
                    "look in `python -m sglang.launch_server --help` for its new name and add it with hs_extra_arguments",
                )
        elif choice[0] not in present:
            command += choice
    return command + list(extra)


def together(tokens: int) -> Needs:
    """What it needs that prompts share a forward, up to ``tokens``."""
    return (
        ("several prompts in a forward", (("--max-running-requests", str(PROMPTS_PER_FORWARD)),), True),
        ("tokens of a forward", (("--max-prefill-tokens", str(tokens)),), True),
    )


def spelt_out(name: str, flags: Set[str]) -> str:
    """The option that the server takes ``name`` for: argparse completes the beginning of a name where only one fits."""
    fitting = [flag for flag in flags if flag.startswith(name)]
    return fitting[0] if name not in flags and len(fitting) == 1 else name


def _known(alternatives: Sequence[Sequence[str]], flags: Set[str]) -> Optional[Sequence[str]]:
    for words in alternatives:
        if not flags or words[0] in flags:
            return words
    return None


# Names a package that SGLang imports before it builds a model: the way in that edits nothing.
EXTERNAL = "SGLANG_EXTERNAL_MODEL_PACKAGE"


def _extraction_env(settings: Mapping[str, Any]) -> Dict[str, str]:
    return {str(key): str(word) for key, word in (settings.get("extraction_env") or {}).items()}


def engine_environment(settings: Mapping[str, Any], production: Mapping[str, str]) -> Dict[str, str]:
    """What the engine's Python is started with when it is asked something: production's environment and what ``extraction_env`` adds to it.

    Where production is down on purpose and was never seen, the operator has only the latter to say what it needs.
    """
    return {**production, **_extraction_env(settings)}


def environment(settings: Mapping[str, Any], library: str, production: Mapping[str, str]) -> Dict[str, str]:
    """What the extraction server's environment has beyond, or other than, production's.

    ``settings``: extraction_env, dump_dir, boundaries, final, no_touch; ``library``: the folder that holds the capture helper.
    """
    path = engine_environment(settings, production).get("PYTHONPATH", "")
    added = _extraction_env(settings)
    added.update(
        {
            "PYTHONPATH": library + (":" + path if path else ""),
            "SGLANG_HS_DUMP_DIR": str(settings["dump_dir"]),
            "SGLANG_HS_BOUNDARIES": ",".join(str(boundary) for boundary in settings["boundaries"]),
            "SGLANG_HS_FINAL": str(settings["final"]),
        }
    )
    if settings.get("no_touch"):
        chained = added.get(EXTERNAL) or production.get(EXTERNAL)
        added[EXTERNAL] = "sglang_hs_models"
        if chained:
            added["SGLANG_HS_CHAIN_MODEL_PACKAGE"] = chained
    return added


# Of systemd's own making: they belong to one start of one unit and would mislead the next process.
_SYSTEMD = (
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "LISTEN_FDS",
    "LISTEN_PID",
    "MAINPID",
    "MEMORY_PRESSURE_WATCH",
    "MEMORY_PRESSURE_WRITE",
    "NOTIFY_SOCKET",
    "SYSTEMD_EXEC_PID",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
)


def inherited(production: Mapping[str, str]) -> Dict[str, str]:
    """Production's environment without what systemd made for that one start."""
    return {key: word for key, word in production.items() if key not in _SYSTEMD}

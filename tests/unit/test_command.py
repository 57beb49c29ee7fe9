"""The extraction server's command from production's: table of cases."""

from __future__ import annotations

import pytest
from sglang_hs import command
from sglang_hs.errors import HsError

PRODUCTION = ["python3", "-m", "sglang.launch_server", "--model-path", "/m", "--tp-size", "8"]
NEW = {
    "--max-running-requests",
    "--disable-radix-cache",
    "--chunked-prefill-size",
    "--disable-cuda-graph",
    "--disable-prefill-cuda-graph",
    "--max-prefill-tokens",
}
OLD = NEW - {"--disable-prefill-cuda-graph"} | {"--disable-piecewise-cuda-graph"}


def made(
    *words: str, flags: set[str] = NEW, drop: tuple[str, ...] = (), extra: tuple[str, ...] = (), tokens: int = 0
) -> list[str]:
    return command.extraction([*PRODUCTION, *words], flags, 31000, "triton", drop, extra, tokens)


def test_values_may_be_many_or_negative_or_after_an_equals_sign() -> None:
    head, options = command.split(["p", "-m", "s", "--a", "1", "2", "--b=3", "--c", "--d", "-1"])
    assert head == ["p", "-m", "s"]
    assert options == [("--a", ("1", "2")), ("--b", ("3",)), ("--c", ()), ("--d", ("-1",))]


@pytest.mark.parametrize(
    "words",
    [
        ("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"),
        ("--num-continuous-decode-steps", "4"),
        ("--cuda-graph-bs", "1", "2", "4"),
        ("--enable-torch-compile",),
        ("--enable-hierarchical-cache", "--hicache-ratio", "2"),
        ("--enable-two-batch-overlap",),
        ("--allow-auto-truncate",),
        ("--api-key", "secret"),
        ("--api-key=secret",),
        ("--host", "0.0.0.0", "--port", "30000"),
        ("--prefill-attention-backend", "fa3"),
        ("--chunked-prefill-size", "8192", "--max-running-requests", "48"),
        # only some releases have these; each would end the extraction or its capture at the start
        ("--enforce-piecewise-cuda-graph", "--piecewise-cuda-graph-max-tokens", "4096"),
        ("--enable-return-aux-hidden-states", "--return-aux-hidden-state-layer-ids", "1", "2"),
        ("--return-hidden-states-mode", "last"),
        ("--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "x"),
        ("--radix-cache-backend", "x", "--radix-eviction-policy-config", "{}"),
        ("--enable-lmcache", "--lmcache-config-file", "/x"),
        ("--decoupled-spec-bind-endpoint", "x"),
    ],
)
def test_what_spoils_a_capture_is_gone_with_its_values(words: tuple[str, ...]) -> None:
    assert made(*words) == made()


def test_the_rest_stays_in_its_order() -> None:
    kept = ["--trust-remote-code", "--mem-fraction-static", "0.9", "--json-model-override-args", '{"a": 1}']
    assert made(*kept)[: len(PRODUCTION) + len(kept)] == PRODUCTION + kept


def test_a_renamed_flag_is_taken_under_the_name_that_the_release_knows() -> None:
    assert "--disable-prefill-cuda-graph" in made(flags=NEW)
    assert "--disable-piecewise-cuda-graph" in made(flags=OLD)
    none = made(flags=OLD - {"--disable-piecewise-cuda-graph"})  # before the prefill graph: nothing to disable
    assert not [word for word in none if "prefill-cuda" in word or "piecewise" in word]
    assert made(flags=NEW - {"--disable-cuda-graph"} | {"--cuda-graph-backend-decode"})[-3:-1] == [
        "--cuda-graph-backend-decode",
        "disabled",
    ]


def test_a_release_without_a_flag_that_a_capture_needs_is_refused() -> None:
    with pytest.raises(HsError, match="--disable-radix-cache"):
        made(flags=NEW - {"--disable-radix-cache"})


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--pp-size", "2"), "pipeline"),
        (("--dp", "2"), "data parallel"),
        (("--enable-dp-attention",), "data-parallel attention"),
        (("--moe-a2a-backend", "deepep"), "all-to-all"),
        (("--nnodes=2",), "several nodes"),
        (("--enable-prefill-cp",), "context parallel"),
        (("--enable-dsa-prefill-context-parallel",), "context parallel"),
        (("--config", "/etc/sglang.yaml"), "takes options from a file"),
        (("--config=/etc/sglang.yaml",), "takes options from a file"),
        (("--disaggregation-mode", "prefill"), "disaggregated"),
    ],
)
def test_a_layout_that_scatters_tokens_is_refused(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(HsError, match=why):
        made(*words)


def test_a_file_of_options_may_be_dropped_knowingly() -> None:
    words = made("--config", "/x.yaml", drop=("--config",), extra=("--max-running-requests", "1"))
    assert "--config" not in words
    assert "/x.yaml" not in words


def test_harmless_values_of_those_are_not_refused() -> None:
    assert "--pp-size" in made("--pp-size", "1", "--moe-a2a-backend", "none")


def test_the_operator_has_the_last_word() -> None:
    assert "--trust-remote-code" not in made("--trust-remote-code", drop=("--trust-remote-code",))
    words = made("--max-running-requests", "48", extra=("--max-running-requests", "2"))
    assert words.count("--max-running-requests") == 1
    assert words[-2:] == ["--max-running-requests", "2"]


def test_an_extra_option_that_the_release_does_not_know_is_refused() -> None:
    with pytest.raises(HsError, match="knows no option --no-such-option"):
        made(extra=("--no-such-option",))


def test_the_helper_comes_before_productions_own_path() -> None:
    settings = {
        "extraction_env": {"NCCL_PROTO": "LL"},
        "dump_dir": "/dev/shm/x",
        "boundaries": [3, 31],
        "final": "both",
    }
    made_of = command.environment(settings, "/lib", {"PYTHONPATH": "/theirs"})
    assert made_of["PYTHONPATH"] == "/lib:/theirs"
    assert command.environment(settings, "/lib", {})["PYTHONPATH"] == "/lib"
    assert made_of["SGLANG_HS_BOUNDARIES"] == "3,31"


def test_a_path_that_the_operator_gives_is_the_engines_and_comes_after_the_helper() -> None:
    """Where production is down on purpose and was never seen, there is no other place to say it."""
    settings = {"extraction_env": {"PYTHONPATH": "/mine", "N": 1}, "dump_dir": "/d", "boundaries": [], "final": "both"}
    for production in ({}, {"PYTHONPATH": "/theirs", "HOME": "/h"}):
        assert command.environment(settings, "/lib", production)["PYTHONPATH"] == "/lib:/mine"
        assert command.engine_environment(settings, production) == {**production, "PYTHONPATH": "/mine", "N": "1"}


def test_prompts_share_a_forward_only_where_that_is_asked_for() -> None:
    words = made("--max-prefill-tokens", "99", "--max-running-requests", "48")
    assert words[words.index("--max-running-requests") + 1] == "1" and "--max-prefill-tokens" not in words
    words = made("--max-prefill-tokens", "99", "--max-running-requests", "48", tokens=8192)
    assert words[words.index("--max-running-requests") + 1] == str(command.PROMPTS_PER_FORWARD)
    assert words.count("--max-prefill-tokens") == 1 and words[words.index("--max-prefill-tokens") + 1] == "8192"


def test_options_that_are_typed_short_are_known_for_what_they_are() -> None:
    flags = NEW | {"--enable-dp-attention", "--speculative-algorithm", "--speculative-num-steps", "--tp", "--tp-size"}
    with pytest.raises(HsError, match="--enable-dp-attention"):
        made("--enable-dp-att", flags=flags)
    words = made("--speculative-alg", "EAGLE", "--max-running", "48", flags=flags)
    assert "EAGLE" not in words and "48" not in words
    assert "--tp" in made("--tp", "8", flags=flags), "a name that is whole is not completed"
    assert "--spec" in made("--spec", "x", flags=flags), "two could be meant: the server itself refuses it"


def test_the_way_in_that_edits_nothing_keeps_the_package_that_production_names() -> None:
    settings = {
        "extraction_env": {},
        "dump_dir": "/dev/shm/x",
        "boundaries": [3],
        "final": "pre_norm",
        "no_touch": True,
    }
    added = command.environment(settings, "/lib", {"SGLANG_EXTERNAL_MODEL_PACKAGE": "theirs"})
    assert added["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "sglang_hs_models"
    assert added["SGLANG_HS_CHAIN_MODEL_PACKAGE"] == "theirs"
    own = dict(settings, extraction_env={"SGLANG_EXTERNAL_MODEL_PACKAGE": "given"})
    assert command.environment(own, "/lib", {})["SGLANG_HS_CHAIN_MODEL_PACKAGE"] == "given"
    assert "SGLANG_HS_CHAIN_MODEL_PACKAGE" not in command.environment(settings, "/lib", {})
    untouched = command.environment(dict(settings, no_touch=False), "/lib", {"SGLANG_EXTERNAL_MODEL_PACKAGE": "theirs"})
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE" not in untouched


def test_what_systemd_made_for_one_start_is_not_inherited() -> None:
    assert command.inherited({"NOTIFY_SOCKET": "x", "INVOCATION_ID": "y", "HF_TOKEN": "z"}) == {"HF_TOKEN": "z"}

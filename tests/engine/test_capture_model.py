"""The capture on real torch modules in every layout: the right states, of the asked-for sequences only, and nothing else changed."""

from __future__ import annotations

import enum
import errno
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from fake_engine import HIDDEN, LAYERS, Model, batch, capture
from safetensors import safe_open
from sglang_hs.dataset import sequence_name
from sglang_hs_capture import engine, hooks, settings
from sglang_hs_capture import exchange as capture_exchange

IDS = [[5, 6, 7, 8, 9], [1, 2], [3], [11, 12, 13]]


class A2A(enum.Enum):
    """How 0.4.10 tells the all-to-all backend that is in effect; later releases say a word."""

    STANDARD = ("standard", "none")
    DEEPEP = "deepep"


def wish(folder: Path, ids: List[int], content: str = "") -> str:
    name = sequence_name(ids)
    (folder / "want" / name).write_text(content)
    return name


def wait(path: Path) -> Path:
    end = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < end, "{} did not come".format(path)
        time.sleep(0.005)
    return path


def data_crc32(folder: Path, name: str) -> str:
    """Of what follows the header, as the whole file has it."""
    data = (folder / "done" / (name + ".safetensors")).read_bytes()
    return "{:08x}".format(zlib.crc32(data[8 + int.from_bytes(data[:8], "little") :]))


def done(folder: Path, name: str, suffix: str = "") -> Dict[str, Any]:
    with safe_open(str(wait(folder / "done" / (name + suffix + ".safetensors"))), framework="pt") as handle:
        return dict({key: handle.get_tensor(key) for key in handle.keys()}, metadata=handle.metadata())


def reason(folder: Path, name: str) -> str:
    return str(json.loads(wait(folder / "failed" / (name + ".json")).read_text())["reason"])


def run(model: Model, *sequences: List[int], **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(None, None, batch(list(sequences), **more))


def test_both_sides_name_a_sequence_alike() -> None:
    ids = [0, 1, 163839, 2**40]
    assert capture_exchange.sequence_name(torch.tensor(ids)) == sequence_name(ids)
    assert capture_exchange.sequence_name(torch.tensor(ids[:3], dtype=torch.int32)) == sequence_name(ids[:3])


@pytest.mark.parametrize("layout", ["A", "B", "C", "D"])
@pytest.mark.parametrize("final", ["pre_norm", "post_norm", "both"])
def test_states_are_right_and_the_answer_unchanged(tmp_path: Path, layout: str, final: str) -> None:
    model = Model(layout)
    plain = run(model, *IDS)
    recorder = capture(model, tmp_path, tuple(range(LAYERS)), final)
    assert json.loads((tmp_path / "attached" / "rank0.json").read_text())["layout"] == layout
    names = [wish(tmp_path, ids) for ids in IDS]
    assert torch.equal(run(model, *IDS), plain)
    for ids, name in zip(IDS, names, strict=True):
        found = done(tmp_path, name)
        boundaries, pre, post = model.reference(ids)
        assert found["token_ids"].tolist() == ids
        assert found["hidden_states"].shape == (len(ids), LAYERS + 1, HIDDEN)
        for slot, state in enumerate([*boundaries, post if final == "post_norm" else pre]):
            torch.testing.assert_close(found["hidden_states"][:, slot], state)
        assert ("final_post_norm" in found) == (final == "both")
        if final == "both":
            torch.testing.assert_close(found["final_post_norm"], post)
        assert int(found["metadata"].pop("header_crc32"), 16)
        assert found["metadata"] == {
            "boundaries": "0,1,2,3,4",
            "final": final,
            "dtype": "float32",
            "release": "0.0-fake",
            "name": name,
            "prompts": str(len(IDS)),
            "crc32": data_crc32(tmp_path, name),
        }
    assert recorder.current is None


def test_nobody_s_wish_is_not_written(tmp_path: Path) -> None:
    model = Model("D")
    capture(model, tmp_path)
    run(model, [1, 2, 3])
    name = wish(tmp_path, [4, 5])
    run(model, [1, 2, 3], [4, 5], [6])
    done(tmp_path, name)
    assert os.listdir(str(tmp_path / "done")) == [name + ".safetensors"]
    assert os.listdir(str(tmp_path / "failed")) == []


def test_other_modes_than_extend_are_passed_over(tmp_path: Path) -> None:
    model = Model("C")
    recorder = capture(model, tmp_path)
    wish(tmp_path, [1])
    for mode in ("DECODE", "MIXED", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND"):
        run(model, [1], mode=mode)
    assert os.listdir(str(tmp_path / "done")) == [] and recorder.current is None


def test_equal_sequences_in_one_forward_are_written_once(tmp_path: Path) -> None:
    model = Model("D")
    capture(model, tmp_path)
    name = wish(tmp_path, [1, 2])
    run(model, [1, 2], [1, 2])
    assert done(tmp_path, name)["token_ids"].tolist() == [1, 2]


def test_prefix_hit_and_chunk_are_refused_with_the_reason(tmp_path: Path) -> None:
    model = Model("D")
    capture(model, tmp_path)
    name = wish(tmp_path, [1, 2, 3])
    run(model, [3], rids=[name + "-1"], prefixes=[2])
    assert "prefix cache hit" in reason(tmp_path, name)
    (tmp_path / "failed" / (name + ".json")).unlink()
    run(model, [1, 2], rids=[name + "-1"])
    assert "not the prompt" in reason(tmp_path, name)
    run(model, [3], prefixes=[2])  # a release without rids: the reason lies beside, under nobody's name
    assert "prefix cache hit" in reason(tmp_path, "unnamed")


def test_padding_at_the_end_is_cut_and_unknown_padding_refused(tmp_path: Path) -> None:
    model = Model("D")
    recorder = capture(model, tmp_path, (1,), "pre_norm")
    name = wish(tmp_path, [1, 2, 3])
    padded = batch([[1, 2, 3]], padding=2)
    recorder.begin(padded)
    assert recorder.current is not None and recorder.current.rows == 3
    recorder.boundary(1, torch.ones(5, HIDDEN))
    recorder.final((torch.ones(5, HIDDEN), None), (torch.ones(5, HIDDEN), torch.full((5, HIDDEN), 2.0)))
    recorder.end()
    assert done(tmp_path, name)["hidden_states"].shape == (3, 2, HIDDEN)
    strange = batch([[1, 2, 3]], rids=[name], padding=2)
    strange.num_token_non_padded_cpu = 5
    recorder.begin(strange)
    assert recorder.current is None and "padding" in reason(tmp_path, name)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (object(), "no tensor"),
        (torch.ones(2, HIDDEN), "shape"),
        (torch.ones(3, HIDDEN, dtype=torch.bfloat16), "bfloat16"),
    ],
)
def test_a_state_that_is_not_whole_is_refused(tmp_path: Path, state: Any, told: str) -> None:
    model = Model("D")
    recorder = capture(model, tmp_path, (1,), "pre_norm")
    name = wish(tmp_path, [1, 2, 3])
    recorder.begin(batch([[1, 2, 3]]))
    recorder.boundary(1, state)
    recorder.end()
    assert told in reason(tmp_path, name)


def test_a_partial_sum_is_refused(tmp_path: Path) -> None:
    model = Model("B")
    recorder = capture(model, tmp_path, (1,), "pre_norm")
    name = wish(tmp_path, [1, 2, 3])
    partial = torch.ones(3, HIDDEN)
    partial._sglang_needs_allreduce_fusion = True
    recorder.begin(batch([[1, 2, 3]]))
    recorder.boundary(1, torch.ones(3, HIDDEN))
    recorder.final((partial, None), (torch.ones(3, HIDDEN), torch.ones(3, HIDDEN)))
    recorder.end()
    assert "partial sum" in reason(tmp_path, name)


def test_hooks_gone_around_are_told(tmp_path: Path) -> None:
    model = Model("D")
    recorder = capture(model, tmp_path, (1, 2))
    name = wish(tmp_path, [1])
    recorder.begin(batch([[1]]))
    recorder.boundary(2, torch.ones(1, HIDDEN))
    recorder.end()
    assert "went around the hooks of: 1, pre_norm, post_norm" in reason(tmp_path, name)


def test_an_engine_error_in_the_forward_frees_the_buffer(tmp_path: Path) -> None:
    model = Model("D")
    capture(model, tmp_path, buffers=1)
    name = wish(tmp_path, [1, 2])
    good, model.layers[4].self_attn.forward = model.layers[4].self_attn.forward, None
    with pytest.raises(TypeError):
        run(model, [1, 2])
    model.layers[4].self_attn.forward = good
    run(model, [9])
    assert "error of the engine" in reason(tmp_path, name)
    run(model, [1, 2])
    done(tmp_path, name)


def test_a_full_disk_fails_the_sequence_and_not_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("D")
    capture(model, tmp_path)
    name = wish(tmp_path, [1, 2])
    real = os.write

    def full(fd: int, data: Any) -> int:
        if len(data) > 200 and b"reason" not in bytes(data[:200]):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr("os.write", full)
    run(model, [1, 2])
    assert "no space left" in reason(tmp_path, name)
    assert os.listdir(str(tmp_path / "done")) == []
    monkeypatch.undo()
    run(model, [1, 2])
    done(tmp_path, name)


def test_the_forward_waits_while_the_storage_lags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang_hs_capture.writer as writer

    real = writer.write_summed

    def slow(*given: Any) -> None:
        time.sleep(0.2)
        real(*given)

    monkeypatch.setattr(writer, "write_summed", slow)
    model = Model("D")
    capture(model, tmp_path, buffers=1)
    names = [wish(tmp_path, [token]) for token in range(4)]
    started = time.monotonic()
    for token in range(4):
        run(model, [token])
    assert time.monotonic() - started >= 0.55  # three of four writes were waited for
    for token, name in enumerate(names):
        assert done(tmp_path, name)["token_ids"].tolist() == [token]


def test_every_rank_writes_only_when_asked(tmp_path: Path) -> None:
    models = [Model("D"), Model("D")]
    for rank, model in enumerate(models):
        capture(model, tmp_path, (1, 3), "both", rank, 2)
    plain, witnessed = wish(tmp_path, [1, 2]), wish(tmp_path, [3, 4, 5], "ranks")
    for model in models:
        run(model, [1, 2], [3, 4, 5])
    done(tmp_path, plain)
    done(tmp_path, witnessed, ".rank0")
    assert not (tmp_path / "done" / (witnessed + ".rank1.safetensors")).exists()  # no marker: rank 1 does not look
    (tmp_path / "every_rank").touch()
    for model in models:
        run(model, [1, 2], [3, 4, 5])
    one = done(tmp_path, witnessed, ".rank1")
    zero = done(tmp_path, witnessed, ".rank0")
    assert torch.equal(one["hidden_states"], zero["hidden_states"])
    assert not (tmp_path / "done" / (plain + ".rank1.safetensors")).exists()
    for index, boundary in enumerate((1, 3)):
        state = models[0].layers[boundary].input_layernorm(zero["hidden_states"][:, index])
        torch.testing.assert_close(zero["attention_input"][index], state)
    assert "attention_input" not in done(tmp_path, witnessed)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"SGLANG_HS_DUMP_DIR": "dump"}, "absolute"),
        ({"SGLANG_HS_BOUNDARIES": "3,x"}, "numbers"),
        ({"SGLANG_HS_BOUNDARIES": "3,2"}, "rise"),
        ({"SGLANG_HS_BOUNDARIES": "-1,2"}, "rise"),
        ({"SGLANG_HS_FINAL": "normed"}, "pre_norm"),
        ({"SGLANG_HS_BUFFERS": "0"}, "1 to 64"),
    ],
)
def test_wrong_settings_are_named(values: Dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        settings.from_environment(dict({"SGLANG_HS_DUMP_DIR": "/dump"}, **values))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"boundaries": "1,5"}, "the model's last one is 4"),
        ({"argument": ("pp_size", 2)}, "pipeline parallelism"),
        ({"argument": ("enable_dp_attention", True)}, "DP attention"),
        ({"argument": ("attn_cp_size", 2)}, "context parallelism"),
        ({"argument": ("moe_a2a_backend", "deepep")}, "all-to-all"),
        ({"argument": ("moe_a2a_backend", A2A.DEEPEP)}, "all-to-all"),
        ({"argument": ("enable_prefill_cp", True)}, "context parallelism"),
        ({"argument": ("enable_two_batch_overlap", True)}, "two-batch overlap"),
        ({"layer": True}, "unknown layout"),
    ],
)
def test_attach_refuses_and_the_server_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Dict[str, Any], told: str
) -> None:
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path / "dump"))
    monkeypatch.setenv("SGLANG_HS_BOUNDARIES", change.get("boundaries", "1,3"))
    name, value = change.get("argument", ("", None))
    monkeypatch.setattr(engine, "server_argument", lambda asked: value if asked == name else None)
    monkeypatch.setattr(hooks, "_attached", None)
    model = Model("D")
    if change.get("layer"):
        model.layers[3] = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=told):
        hooks.attach(model)
    refused = json.loads((tmp_path / "dump" / "attached" / "refused-rank0.json").read_text())
    assert told in refused["reason"]
    assert not (tmp_path / "dump" / "attached" / "rank0.json").exists()
    assert oct((tmp_path / "dump").stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize("value", [None, "none", A2A.STANDARD])
def test_experts_that_stay_on_their_rank_are_captured(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.setattr(engine, "server_argument", lambda asked: value if asked == "moe_a2a_backend" else None)
    assert engine.refusals(Model("A"), "cpu") == []


def test_attach_reports_itself_once_per_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("SGLANG_HS_BOUNDARIES", "0,4")
    monkeypatch.setattr(engine, "server_argument", lambda asked: None)
    monkeypatch.setattr(hooks, "_attached", None)
    hooks.attach(Model("B"))
    told = json.loads((tmp_path / "attached" / "rank0.json").read_text())
    assert (told["boundaries"], told["num_layers"], told["tp_size"], told["dtype"]) == ([0, 4], LAYERS, 1, "float32")
    assert len(told["helper_sha256"]) == 64
    with pytest.raises(RuntimeError, match="second model"):
        hooks.attach(Model("B"))

"""docs/training.md: each command goes through the trainer's own parser, which must take every option and understand it as meant."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from docs_run import docs_text
from local_host import CACHE, REPO
from trainers import PYTHON, folder

sys.path.insert(0, str(REPO / "docs"))

from layers_picture import numbers

MODEL = CACHE / "engine/model"
BOUNDARIES = [3, 31, 59]


def doc(text: str) -> list[str]:
    """A command that a page prints, as words; a model's path is that of the local engine."""
    assert text in {command.text for command in docs_text.commands()}
    return shlex.split(text.replace("/models/Kimi-K2.5-INT4", str(MODEL)))


def run(readers: list[str], *words: str, cwd: Path) -> str:
    """Run words in the engine's Python with the trainers' packages; standard output."""
    path = os.pathsep.join(str(folder(name)) for name in readers)
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(PYTHON), "-W", "ignore", *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(autouse=True, scope="module")
def packages() -> None:
    if not (CACHE / "engine/venv/bin/python").exists():
        pytest.skip("the local engine is not built")


# fmt: off
TRAIN = doc("python -m speculators train --speculator-type eagle3 --verifier-name-or-path /models/Kimi-K2.5-INT4 --trust-remote-code --data-path /data/hidden-states --target-layer-ids 3 31 59 --on-missing skip --total-seq-len 8192 --save-path /data/drafter")  # noqa: E501
SPREAD = doc("torchrun --nproc_per_node=8 -m speculators.train --speculator-type eagle3 --verifier-name-or-path /models/Kimi-K2.5-INT4 --trust-remote-code --data-path /data/hidden-states --target-layer-ids 3 31 59 --on-missing skip --total-seq-len 8192 --save-path /data/drafter")  # noqa: E501
# fmt: on


def test_speculators_takes_every_option_and_the_layers_as_meant(tmp_path: Path) -> None:
    told = yaml.safe_load(run(["current", "training"], *TRAIN[1:], "--dump-config", cwd=tmp_path))["train"]
    assert told["speculator_type"] == "eagle3"
    assert told["draft"]["target_layer_ids"] == BOUNDARIES == [numbers(boundary)[5] for boundary in BOUNDARIES]
    assert told["data"] == {"data_path": "/data/hidden-states", "total_seq_len": 8192}
    assert told["generation"]["on_missing"] == "skip"
    assert told["verifier"]["verifier_name_or_path"] == str(MODEL)


def test_torchrun_starts_the_same_training(tmp_path: Path) -> None:
    begin = SPREAD.index("speculators.train") + 1
    assert SPREAD[begin:] == TRAIN[4:]
    code = "import json, sys; from torch.distributed.run import get_args_parser as p; print(json.dumps(vars(p().parse_args(sys.argv[1:]))))"
    told = json.loads(run(["current"], "-c", code, *SPREAD[1:], cwd=tmp_path))
    assert (told["nproc_per_node"], told["module"], told["training_script"]) == ("8", True, "speculators.train")


def test_speculators_0_7_takes_the_legacy_data(tmp_path: Path) -> None:
    code = docs_text.block("speculators-0.7-train") + "print(config.dump_yaml())"
    told = yaml.safe_load(run(["speculators-0.7", "current", "training"], "-c", code, cwd=tmp_path))["train"]
    assert told["data"]["legacy_data"] is True
    assert told["data"]["data_path"] == "/data/hidden-states-speculators-pt"
    assert told["draft"]["target_layer_ids"] == BOUNDARIES


def test_specforge_takes_the_file_and_plans_offline_training(tmp_path: Path) -> None:
    text = docs_text.block("specforge.yaml").replace("/models/Kimi-K2.5-INT4", str(MODEL))
    (tmp_path / "specforge.yaml").write_text(text)
    words = doc("specforge train --config specforge.yaml --plan")
    plan = json.loads(run(["current"], "-m", "specforge.cli", *words[1:], cwd=tmp_path))
    assert (plan["kind"], plan["role"]) == ("worker", "all")
    more = json.loads(
        run(["current"], "-m", "specforge.cli", *words[1:], "deployment.trainer.nproc_per_node=8", cwd=tmp_path)
    )
    assert more["kind"] != "worker" and "8" in json.dumps(more)
    code = (
        "import json; from specforge.config import load_config; c = load_config('specforge.yaml', []);"
        "from specforge.algorithms.model_providers import resolve_eagle_capture_layers as r; from types import SimpleNamespace as N;"
        "print(json.dumps([c.mode, r(c, {}, N(num_hidden_layers=61)), c.model.embedding_key, c.model.lm_head_key]))"
    )
    mode, layers, *keys = json.loads(run(["current"], "-c", code, cwd=tmp_path))
    assert mode == "offline"
    assert layers == [numbers(boundary)[1] for boundary in BOUNDARIES]
    # the keys are those of a checkpoint of Kimi-K2.5: the local engine's has the same names
    names = run(
        ["current"],
        "-c",
        f"from safetensors import safe_open; print(*safe_open('{MODEL}/model.safetensors', 'pt').keys())",
        cwd=tmp_path,
    )
    assert set(keys) <= set(names.split())


def test_no_default_of_a_trainer_is_what_was_captured(tmp_path: Path) -> None:
    """training.md says what the tools would take unasked."""
    page = (REPO / "docs/training.md").read_text()
    code = (
        "from types import SimpleNamespace as N; import json;"
        "import speculators.models.utils as u; u.get_verifier_config = lambda *a, **k: N(num_hidden_layers=61);"
        "from specforge.algorithms.model_providers import resolve_eagle_capture_layers as r;"
        "print(json.dumps([u.resolve_target_layer_ids(None, ''),"
        " r(N(model=N(aux_hidden_state_layer_ids=None)), {}, N(num_hidden_layers=61))]))"
    )
    theirs, forge = json.loads(run(["current", "training"], "-c", code, cwd=tmp_path).splitlines()[-1])
    assert f"speculators would take {', '.join(map(str, theirs))}" in page
    assert f"SpecForge {', '.join(map(str, forge))}" in page

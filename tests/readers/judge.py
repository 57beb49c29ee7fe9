"""The trainers' own readers judge an output folder and its exports. Runs in the engine's Python, a readers' folder on its path.

    judge.py READER CAPTURED FOLDER DATASET [CODE]

READER: speculators-0.9, speculators-0.7, speculators-0.3, specforge, modelopt, and speculators-0.9-archives, specforge-archives for a folder of
archives as moving leaves it. CAPTURED: the output folder, captured with both final
states, which the tests compare with Hugging Face's; DATASET: the JSON lines that it was made of. Each sample that a reader hands out
must be the captured one, value by value. CODE, the page's own commands, must run and leave a ``sample``. Then one file at a time is
spoiled in a copy, and the judgement must be another.
"""

from __future__ import annotations

import importlib
import json
import pickle
import shutil
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LONGEST = 4096  # tokens: longer than any sample
SPOILED = 0  # the row that is spoiled


class Wrong(Exception):
    """What a reader hands out is not what was captured."""


@dataclass
class Truth:
    """One row: ids and mask out of the data set itself, states out of the captured file. states [T, n, H], pre and post [T, H]."""

    ids: torch.Tensor
    mask: torch.Tensor
    states: torch.Tensor
    pre: torch.Tensor
    post: torch.Tensor


def truths(captured: Path, dataset: Path) -> list[Truth]:
    """Every row; the data set's own ids, so that an exchange of files is seen."""
    found = []
    for idx, line in enumerate(dataset.read_text().splitlines()):
        row, states = json.loads(line), load_file(captured / "hidden_states" / f"hs_{idx}.safetensors")
        found.append(
            Truth(
                torch.tensor(row["input_ids"]),
                torch.tensor(row["loss_mask"]),
                states["hidden_states"][:, :-1],
                states["hidden_states"][:, -1],
                states["final_post_norm"],
            )
        )
    return found


def same(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal in type, shape and every bit."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        raise Wrong(f"{what}: {found.dtype} {list(found.shape)} instead of {wanted.dtype} {list(wanted.shape)}")
    if not torch.equal(found, wanted):
        raise Wrong(f"{what}: other values")


def counted(found: int, wanted: int) -> None:
    """As many samples as rows."""
    if found != wanted:
        raise Wrong(f"{found} samples instead of {wanted}")


# -- speculators 0.9: the output folder itself ---------------------------------------------------------------------------


def speculators_native(folder: Path, truth: list[Truth]) -> None:
    """ArrowDataset (datasets.load_from_disk), FileTransfer, check_hidden_states, and the collation of a batch."""
    from hs_connectors import FileTransfer
    from speculators.data_generation.offline import (
        check_hidden_states,
        find_corrupt_hidden_state_indices,
        get_existing_hidden_state_indices,
    )
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset, CollateFn

    indices = get_existing_hidden_state_indices(folder / "hidden_states")
    if indices != list(range(len(truth))) or find_corrupt_hidden_state_indices(folder / "hidden_states", indices):
        raise Wrong("speculators does not find every file, or finds some corrupt")
    data = ArrowDataset(max_len=LONGEST, datapath=str(folder), on_missing="raise", hidden_states_dtype=torch.float32)
    counted(len(data), len(truth))
    if data.approx_lengths != [len(row.ids) for row in truth]:
        raise Wrong("seq_len: other lengths")
    transfer = FileTransfer(folder / "hidden_states")
    for idx, row in enumerate(truth):
        payload = transfer.get_cached(idx)
        check_hidden_states(payload, row.ids.tolist())
        item = data[idx]
        if not isinstance(item, dict):
            raise Wrong(f"row {idx}: {item!r}")
        same("input_ids", item["input_ids"], row.ids)
        same("loss_mask", item["loss_mask"], row.mask)
        same("hidden_states", item["hidden_states"], row.states.flatten(1))
        same("verifier_last_hidden_states", item["verifier_last_hidden_states"], row.pre)
    hidden = truth[0].pre.shape[1]
    collate = CollateFn(LONGEST, hidden, truth[0].states.shape[1], torch.float32, preprocess=shift_batch)
    batch = collate([data[0], data[1]])
    length = len(truth[0].ids) - 1
    same("a batch's input_ids", batch["input_ids"][0, :length], truth[0].ids[1:])
    same("a batch's hidden_states", batch["hidden_states"][0, :length], truth[0].states.flatten(1)[:-1])
    same("a batch's loss_mask", batch["loss_mask"][0, :length], truth[0].mask[1:])


def speculators_archives(folder: Path, truth: list[Truth]) -> None:
    """ArrowDataset and check_hidden_states on archives, in place; and in a worker of torch's own data loader, to which it is pickled."""
    import sglang_hs_archives
    from speculators.data_generation.offline import check_hidden_states
    from speculators.train.data import ArrowDataset
    from torch.utils.data import DataLoader

    transfer = sglang_hs_archives.speculators(folder)
    data = ArrowDataset(
        max_len=LONGEST, datapath=str(folder), transfer=transfer, on_missing="raise", hidden_states_dtype=torch.float32
    )
    counted(len(data), len(truth))
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
    for idx, (row, item) in enumerate(zip(truth, loader, strict=True)):
        check_hidden_states(transfer.get_cached(idx), row.ids.tolist())
        same("input_ids", item["input_ids"], row.ids)
        same("loss_mask", item["loss_mask"], row.mask)
        same("hidden_states", item["hidden_states"], row.states.flatten(1))
        same("verifier_last_hidden_states", item["verifier_last_hidden_states"], row.pre)
    again = pickle.loads(pickle.dumps(transfer))
    same("a pickled transfer's states", again.get_cached(0)["hidden_states"][:, :-1], truth[0].states)


def missing_is_passed_over(folder: Path) -> None:
    """A row whose file is not there (in quarantine): skip and warn pass over it, and its neighbours stay in their place."""
    from speculators.train.data import ArrowDataset
    from speculators.train.recovery import SampleUnavailable

    for choice in ("skip", "warn"):
        data = ArrowDataset(max_len=LONGEST, datapath=str(folder), on_missing=choice)
        if not isinstance(data[SPOILED], SampleUnavailable) or not isinstance(data[SPOILED + 1], dict):
            raise Wrong(f"a missing file with on_missing={choice}")


# -- the .pt files of older speculators ----------------------------------------------------------------------------------


def standing_for(package: str) -> None:
    """Make ``package`` importable without running its own __init__: a module with its folder and nothing in it."""
    folder = next(
        Path(place) / package.replace(".", "/")
        for place in sys.path
        if (Path(place) / package.replace(".", "/")).is_dir()
    )
    made = types.ModuleType(package)
    made.__path__ = [str(folder)]
    sys.modules[package] = made


def speculators_pt(folder: Path, truth: list[Truth], release: str) -> None:
    """The data set class that walks a folder of data_{i}.pt; 0.3 shifts within itself and reads the post-norm final state."""
    if release == "0.3":
        # its __init__ builds models that do not fit today's transformers; the reader's two files are its own
        standing_for("speculators")
        standing_for("speculators.train")
    module: Any = importlib.import_module("speculators.train.data")
    kind = module.Eagle3SampleFileDataset if release == "0.3" else module.SampleFileDataset
    data = kind(max_len=LONGEST, datapath=str(folder), hidden_states_dtype=torch.float32)
    counted(len(data), len(truth))
    for place, path in enumerate(data.data):
        row, item = truth[int(Path(path).stem.split("_")[-1])], data[place]
        if release != "0.3" and data.approx_lengths[place] != len(row.ids):
            raise Wrong("sample_lengths.json: another length")
        later, before = (slice(1, None), slice(None, -1)) if release == "0.3" else (slice(None), slice(None))
        same("input_ids", item["input_ids"], row.ids[later])
        same("loss_mask", item["loss_mask"], row.mask[later])
        same("hidden_states", item["hidden_states"], row.states.flatten(1)[before])
        last = row.post if release == "0.3" else row.pre
        same("verifier_last_hidden_states", item["verifier_last_hidden_states"], last[later])


# -- SpecForge -----------------------------------------------------------------------------------------------------------


def specforge(folder: Path, truth: list[Truth]) -> None:
    """OfflineManifestReader with its eager validation, load_feature_file, and EAGLE-3's normalization."""
    from specforge.algorithms.eagle3.data import normalize_offline_sample
    from specforge.runtime.data_plane.feature_store import load_feature_file
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    refs = OfflineManifestReader(str(folder), max_len=LONGEST, validate_files=True).read()
    counted(len(refs), len(truth))
    for ref in refs:
        path = ref.feature_store_uri[len("file://") :]
        row = truth[int(Path(path).stem.split("_")[-1])]
        if ref.num_tokens != len(row.ids):
            raise Wrong(f"{ref.num_tokens} tokens instead of {len(row.ids)}")
        item = normalize_offline_sample(load_feature_file(path), LONGEST)
        mask = row.mask.clone()
        mask[-1] = 0  # SpecForge does so itself
        same("input_ids", item["input_ids"], row.ids[None])
        same("loss_mask", item["loss_mask"], mask[None])
        same("hidden_state", item["hidden_state"], row.states.flatten(1)[None])
        same("target", item["target"], row.post[None])


# -- ModelOpt ------------------------------------------------------------------------------------------------------------


def modelopt(folder: Path, truth: list[Truth]) -> None:
    """OfflineSupervisedDataset with the loss mask of the files, and its collator."""
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    files = sorted(folder.glob("*.pt"))
    counted(len(files), len(truth))
    data = OfflineSupervisedDataset([str(path) for path in files], answer_only_loss=True)
    for place, path in enumerate(files):
        row, item = truth[int(path.stem.split("_")[-1])], data[place]
        same("input_ids", item["input_ids"], row.ids)
        same("loss_mask", item["loss_mask"], row.mask)
        same("aux_hidden_states", item["aux_hidden_states"], row.states.flatten(1))
        if item["base_hidden_prenorm"] is not False:
            raise Wrong("hidden_states_prenorm is said of the post-norm state")
        same("hidden_states", item["base_model_hidden_states"], row.post)
    batch = EagleOfflineDataCollator(LONGEST)([data[0], data[1]])
    for place in (0, 1):
        row = truth[int(files[place].stem.split("_")[-1])]
        outputs, length = batch["base_model_outputs"], len(row.ids)
        same("a batch's hidden states", outputs["base_model_hidden_states"][place, :length], row.post)
        same("a batch's aux_hidden_states", outputs["aux_hidden_states"][place, :length], row.states.flatten(1))


# -- spoiling ------------------------------------------------------------------------------------------------------------


def spoil_saved(path: Path, how: str, truth: Truth) -> None:
    """Spoil a file of torch.save: the other final state, a token less in every tensor, or boundaries of another width."""
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    for key, value in saved.items():
        if isinstance(value, list) and how == "swap":
            value[-1] = truth.post if torch.equal(value[-1], truth.pre) else truth.pre
        elif isinstance(value, list):
            saved[key] = [state[:-1] if how == "token" else state[:, :-1] for state in value]
        elif isinstance(value, torch.Tensor):
            alone = key in ("hidden_state", "hidden_states")
            axis = 1 if value.shape[0] == 1 and value.dim() == 3 else 0
            if how == "swap" and alone:
                other = truth.post if torch.equal(value.squeeze(0), truth.pre) else truth.pre
                saved[key] = other.reshape(value.shape)
            elif how == "token":
                saved[key] = value.narrow(axis, 0, value.shape[axis] - 1)
            elif how == "width" and key.startswith("aux"):
                saved[key] = value[..., :-1]
    torch.save(saved, path)


def spoil_captured(path: Path, how: str, truth: Truth) -> None:
    """The same of a captured file."""
    saved = load_file(path)
    if how == "swap":
        saved["hidden_states"][:, -1] = truth.post
    elif how == "token":
        saved["hidden_states"] = saved["hidden_states"][:-1].contiguous()
    else:
        saved["hidden_states"] = saved["hidden_states"][:, 1:].contiguous()
    save_file(saved, path)


def spoil_archive(folder: Path, how: str, truth: Truth) -> None:
    """The same of a sample in its archive."""
    index = json.loads((folder / "archives.json").read_text())
    path = folder / next(one["file"] for one in index["archives"] if SPOILED in one["samples"])
    saved, key = load_file(path), f"{SPOILED}.hidden_states"
    if how == "swap":
        saved[key][:, -1] = truth.post
        saved[f"{SPOILED}.final_post_norm"] = truth.pre.clone()
    elif how == "token":
        saved[key] = saved[key][:-1].contiguous()
        saved[f"{SPOILED}.final_post_norm"] = saved[f"{SPOILED}.final_post_norm"][:-1].contiguous()
    else:
        saved[key] = saved[key][:, 1:].contiguous()
    save_file(saved, path)


def must_complain(reader: str, judge: Callable[[Path], None], folder: Path, truth: list[Truth]) -> None:
    """Each way of spoiling one file must be seen, by the reader itself or by the comparison."""
    native = reader == "speculators-0.9"
    for how in ("swap", "token", "width"):
        with tempfile.TemporaryDirectory() as place:
            copy = Path(place) / "copy"
            shutil.copytree(folder, copy)
            if reader.endswith("-archives"):
                spoil_archive(copy, how, truth[SPOILED])
                complained(reader, how, judge, copy)
                continue
            names = (f"hs_{SPOILED}.safetensors", f"data_{SPOILED}.pt", f"data_{SPOILED}.ckpt", f"row_{SPOILED}.pt")
            path = next(path for name in names for path in copy.rglob(name))
            (spoil_captured if native else spoil_saved)(path, how, truth[SPOILED])
            complained(reader, how, judge, copy)


def complained(reader: str, how: str, judge: Callable[[Path], None], copy: Path) -> None:
    """``judge`` must see that the copy was spoiled."""
    try:
        judge(copy)
    except Exception as error:
        print(f"  spoiled ({how}): {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return
    raise SystemExit(f"{reader}: a file spoiled by {how} was taken for a good one")


def specforge_archives(folder: Path, truth: list[Truth]) -> None:
    """SpecForge's own reader, validation, feature store and normalization on a folder of archives."""
    import sglang_hs_archives

    sglang_hs_archives.specforge()
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    sglang_hs_archives._archives.cache_clear()  # the judge comes with another folder each time
    specforge(folder, truth)
    refs = OfflineManifestReader(str(folder), max_len=LONGEST).read()
    item, _ = LocalFeatureStore().get(refs[1])
    same("the feature store's aux_hidden_state", item["aux_hidden_state"], truth[1].states.flatten(1)[None])


def printed(code: Path) -> None:
    """Run the commands that docs/formats.md prints."""
    names: dict[str, Any] = {}
    exec(compile(code.read_text(), str(code), "exec"), names)
    if names["sample"]["input_ids"].numel() < 2:
        raise Wrong("the printed commands load no sample")
    print("  the printed commands run")


def main(reader: str, captured: Path, folder: Path, dataset: Path, *code: Path) -> int:
    """Judge, then judge what is spoiled."""
    warnings.simplefilter("ignore")
    truth = truths(captured, dataset)
    judges: dict[str, Callable[[Path], None]] = {
        "speculators-0.9": lambda place: speculators_native(place, truth),
        "speculators-0.7": lambda place: speculators_pt(place, truth, "0.7"),
        "speculators-0.3": lambda place: speculators_pt(place, truth, "0.3"),
        "speculators-0.9-archives": lambda place: speculators_archives(place, truth),
        "specforge": lambda place: specforge(place, truth),
        "specforge-archives": lambda place: specforge_archives(place, truth),
        "modelopt": lambda place: modelopt(place, truth),
    }
    if not reader.startswith("speculators-0.9"):
        for path in folder.rglob("*.*pt"):
            torch.load(path, weights_only=True)
    judges[reader](folder)
    package = {"modelopt": "nvidia-modelopt"}.get(reader, reader.split("-")[0])
    print(f"{package} {version(package)}: {len(truth)} samples of {folder} are what was captured")
    for page in code:
        printed(page)
    must_complain(reader, judges[reader], folder, truth)
    if reader == "speculators-0.9":
        with tempfile.TemporaryDirectory() as place:
            copy = Path(place) / "copy"
            shutil.copytree(folder, copy)
            (copy / "hidden_states" / f"hs_{SPOILED}.safetensors").unlink()
            missing_is_passed_over(copy)
        print("  a missing file is passed over with on_missing skip and warn")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(Path, sys.argv[2:])))

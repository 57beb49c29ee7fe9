"""manifest.json: what an output folder is, for somebody who has nothing but the folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Dict, List

from sglang_hs.fsio import write_json

from .checkpoint import file_hashes
from .spec import Spec

FORMAT = 1


def conventions(boundary: int) -> Dict[str, Any]:
    """One boundary in everybody's numbering. Boundary b is the residual stream before layer b, that is after layer b - 1."""
    after = boundary - 1 if boundary else None
    return {
        "boundary": boundary,
        "meaning": "residual stream before layer {} (zero-based){}".format(
            boundary, ", the embedding" if not boundary else ""
        ),
        "output_of_layer": after,  # SpecForge, TorchSpec, ModelOpt, and EAGLE-3's own layer ids: zero-based outputs
        "vllm": boundary,  # vLLM's aux_hidden_state layers count boundaries
        "huggingface_hidden_states_index": boundary,  # hidden_states[0] is the embedding
        "sglang_layers_to_capture": boundary,
        "sglang_set_eagle3_layers_to_capture_until_0_5_12": after,  # adds one to each id
        # from 0.5.13 it adds one only if the first id is 1
        "sglang_set_eagle3_layers_to_capture_from_0_5_13": boundary,
    }


def manifest(
    spec: Spec,
    attached: Dict[str, Any],
    identity: Dict[str, Any],
    counts: Dict[str, int],
    canary: Dict[str, Any],
    extra: Dict[str, Any],
) -> Dict[str, Any]:
    """The document. counts: see Manifest.counts; sizes are given in bytes, GB (10^9) and GiB (2^30)."""
    slots: List[Dict[str, Any]] = [
        dict(conventions(boundary), slot=slot) for slot, boundary in enumerate(spec.boundaries)
    ]
    last_normed = spec.final == "post_norm"
    slots.append(
        {
            "slot": len(spec.boundaries),
            "meaning": "final state, {} the model's final norm".format("after" if last_normed else "before"),
            "normed": last_normed,
        }
    )
    size = counts["bytes_done"]
    return {
        "format": FORMAT,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "layout": {
            "files": "hidden_states/hs_{idx}.safetensors, idx = row number in the data set from 0",
            "token_ids": "int64 [T]",
            "hidden_states": "{} [T, {}, {}]".format(attached["dtype"], spec.states, spec.hidden_size),
            "final_post_norm": "{} [T, {}]".format(attached["dtype"], spec.hidden_size)
            if spec.final == "both"
            else None,
            "shifted": False,
        },
        "boundaries": spec.boundaries,
        "slots": slots,
        "final": spec.final,
        "hidden_states_prenorm": not last_normed,  # ModelOpt's name for it
        "dtype": attached["dtype"],
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_layers": attached["num_layers"],
        "engine": {key: attached[key] for key in ("release", "layout", "tp_size", "helper_sha256", "server")},
        "dataset": {"path": spec.dataset, "sha256": identity["dataset_sha256"], "cut_to": spec.cut_to},
        "model": {
            "path": spec.model_path,
            "fingerprint": identity["model"],
            "sha256": file_hashes(Path(spec.model_path)),
        },
        "counts": counts,
        "size": {"bytes": size, "GB": round(size / 1e9, 3), "GiB": round(size / 2**30, 3)},
        "complete": counts["pending"] == 0 and counts["failed"] == 0 and counts["bad"] == 0,
        "checksums": "manifest.sqlite, table samples, column sha256 (of each file)",
        "canary": canary,
        "run_id": spec.run_id,
        "provenance": spec.provenance,
        **extra,
    }


def write(output: Path, document: Dict[str, Any]) -> None:
    """Put it beside the data."""
    write_json(output / "manifest.json", document, 0o644)

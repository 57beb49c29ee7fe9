"""What the checkpoint's config.json says of the model: sizes that the plan, the client and the canary need."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Dict

from .errors import HsError
from .fsio import read_json

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float": 4, "half": 2}


def describe(path: str, dtype: str = "auto") -> Dict[str, Any]:
    """Sizes of the model in folder ``path``.

    Returns architecture, hidden_size (H), num_layers, vocab_size, max_position (tokens), dtype (of the residual stream) and
    itemsize (bytes). ``dtype`` is the server's --dtype. Kimi-K2.5 keeps the language model's part under ``text_config``.
    """
    if not os.path.isdir(path):
        raise HsError(
            "the model path {} is not a folder on this host".format(path),
            "everything: production was not touched",
            "set hs_model_path to the folder that holds the checkpoint's config.json",
        )
    config = read_json(Path(path) / "config.json")
    if not isinstance(config, dict):
        raise HsError(
            "the model folder {} holds no config.json".format(path),
            "everything: production was not touched",
            "set hs_model_path to the folder that holds the checkpoint's config.json",
        )
    text = config.get("text_config") or config
    if dtype == "auto":
        dtype = str(
            text.get("dtype")
            or text.get("torch_dtype")
            or config.get("dtype")
            or config.get("torch_dtype")
            or "bfloat16"
        )
        if dtype == "float32":  # the engine's own rule: auto serves a float32 checkpoint in half precision
            dtype = "float16"
    try:
        return {
            "path": path,
            "architecture": (config.get("architectures") or ["?"])[0],
            "hidden_size": int(text["hidden_size"]),
            "num_layers": int(text["num_hidden_layers"]),
            "vocab_size": int(text["vocab_size"]),
            "max_position": int(text.get("max_position_embeddings", 0)),
            "dtype": dtype,
            "itemsize": DTYPE_BYTES.get(dtype, 2),
        }
    except KeyError as error:
        raise HsError(
            "{}/config.json has no {}: not a DeepSeek-family model".format(path, error),
            "everything: production was not touched",
            "point hs_model_path at the model that production serves",
        ) from error


def fingerprint(folder: Path) -> str:
    """What tells two models apart without reading their weights: config.json and the names and sizes of the weight files."""
    total = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        total.update(config.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        total.update("{} {}\n".format(path.name, path.stat().st_size).encode())
    return total.hexdigest()

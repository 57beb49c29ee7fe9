"""Single rows and vectors out of the model's checkpoint, read where they lie: the canary needs kilobytes, not the model."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch
from safetensors import safe_open
from sglang_hs.errors import HsError

PREFIXES = ("", "language_model.")  # the second is Kimi-K2.5's


class Checkpoint:
    """Folder of safetensors files with a config.json. Tensors are named without the ``language_model.`` prefix."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.config: Dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._unusable("its config.json is not readable: {}".format(error)) from error
        self.text_config: Dict[str, Any] = self.config.get("text_config") or self.config
        self.eps = float(self.text_config.get("rms_norm_eps", 1e-6))
        self._files = self._index()

    def _unusable(self, why: str) -> HsError:
        return HsError(
            "the checkpoint {} cannot serve the canary: {}".format(self.folder, why),
            "everything: no sample was extracted",
            "set model_path to the folder that the server loads",
        )

    def _index(self) -> Dict[str, Path]:
        """Tensor name -> file, from the index or, where there is none, from the files' own headers."""
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return {
                name: self.folder / file
                for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
            }
        found = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(str(path), framework="pt") as handle:
                found.update({name: path for name in handle.keys()})
        if not found:
            raise self._unusable("it holds no safetensors files")
        return found

    def _find(self, names: Iterable[str]) -> Optional[str]:
        candidates = [prefix + name for name in names for prefix in PREFIXES]
        return next((name for name in candidates if name in self._files), None)

    def vector(self, name: str) -> torch.Tensor:
        """The whole of a small tensor, as float32."""
        found = self._find([name])
        if found is None:
            raise self._unusable("it has no {}".format(name))
        with safe_open(str(self._files[found]), framework="pt") as handle:
            return handle.get_tensor(found).to(torch.float32)

    def head_rows(self, tokens: List[int]) -> Dict[int, torch.Tensor]:
        """Rows of lm_head (or of the embedding where the two are tied): token -> float32 [H]."""
        names = ["lm_head.weight"]
        if self.text_config.get("tie_word_embeddings"):
            names.append("model.embed_tokens.weight")
        found = self._find(names)
        if found is None:
            raise self._unusable("it has no lm_head.weight")
        with contextlib.ExitStack() as stack:
            handle = stack.enter_context(safe_open(str(self._files[found]), framework="pt"))
            part = handle.get_slice(found)
            return {token: part[token : token + 1].to(torch.float32)[0] for token in sorted(set(tokens))}


# Small files that decide what a token id means and how the model is built.
DESCRIBING = ("config.json", "generation_config.json", "preprocessor_config.json")
TOKENIZER: Tuple[str, ...] = (
    "tokenizer*",
    "tokenization_*.py",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "tiktoken.model",
)


def file_hashes(folder: Path) -> Dict[str, Dict[str, str]]:
    """sha256 of the model's describing files: {"config": {name: hash}, "tokenizer": {name: hash}}; weights are not read."""

    def hashes(patterns: Iterable[str]) -> Dict[str, str]:
        found = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}

    return {"config": hashes(DESCRIBING), "tokenizer": hashes(TOKENIZER)}

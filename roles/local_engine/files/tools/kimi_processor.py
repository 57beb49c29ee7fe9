"""The media processor that the tiny Kimi-K2.5 folder ships as remote code.

The published model ships one of the same shape: `preprocessor_config.json` names it
in `auto_map`, the engine loads it with `--trust-remote-code` and reads
`media_processor.media_proc_cfg`. This one declares the geometry and counts tokens, but
turns no picture into pixels: the local engine is asked for text only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


class TinyMediaProcessor:
    """Geometry of the vision tower: patch size in pixels, limits in patches."""

    def __init__(self, media_proc_cfg: dict[str, Any]) -> None:
        """Keep the configuration, which the engine reads too."""
        self.media_proc_cfg = media_proc_cfg

    def media_tokens_calculator(self, media: dict[str, Any]) -> int:
        """Count the placeholder tokens of one picture.

        Args:
            media: `{"type": "image", "image": picture}`; `picture.size` is (width, height) in pixels.

        Returns:
            Tokens, one for each merged square of patches, at least 1.
        """
        width, height = media["image"].size
        side = self.media_proc_cfg["patch_size"] * self.media_proc_cfg["merge_kernel_size"]
        return max(1, -(-width // side) * -(-height // side))


class TinyKimiProcessor:
    """Tokenizer and media processor under the names that the engine asks for."""

    def __init__(self, tokenizer: Any, media_processor: TinyMediaProcessor) -> None:
        """Take the two parts; the engine asks for the second under either name."""
        self.tokenizer = tokenizer
        self.media_processor = media_processor
        self.image_processor = media_processor

    @classmethod
    def from_pretrained(cls, folder: str, *_args: Any, **_options: Any) -> TinyKimiProcessor:
        """Load from a model folder; options of the hub (revision, token, ...) do not apply to it."""
        config = json.loads((Path(folder) / "preprocessor_config.json").read_text(encoding="utf-8"))
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return cls(tokenizer, TinyMediaProcessor(config["media_proc_cfg"]))

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoProcessor") -> None:
        """Accept the call that transformers makes on every class it loads from a folder."""

    def __call__(self, text: Any = None, medias: Any = None, **options: Any) -> Any:
        """Tokenize text.

        Raises:
            NotImplementedError: pictures were given.
        """
        if medias:
            raise NotImplementedError("the tiny Kimi-K2.5 model of the local engine takes text only")
        options.setdefault("return_tensors", "pt")
        return self.tokenizer(text, **options)

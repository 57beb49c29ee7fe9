"""Write the tiny seeded model that the local engine serves.

Two layouts with the same weights:

* `kimi_k25`: `KimiK25ForConditionalGeneration`, tensors prefixed `language_model.`, with the tokenizer and
  processor files that a multimodal model folder holds;
* `deepseek_v3`: plain `DeepseekV3ForCausalLM`, which Hugging Face loads too: the reference to compare with.

The folder is complete or absent: it is written beside its place and renamed. Its `generator.json` holds what it
was made from and the checksum of each file; a folder that still agrees with both is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cache_lock import locked

RECORD = "generator.json"
PROCESSOR = Path(__file__).with_name("kimi_processor.py")
VOCABULARY = 512  # tokens
#: Names of the ids from 0 on; the rest of the vocabulary is `<t12>`, `<t13>`, ...
SPECIAL_TOKENS = (
    "[BOS]",
    "[EOS]",
    "[PAD]",
    "[UNK]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
)
MEDIA_PAD = SPECIAL_TOKENS.index("<|media_pad|>")

#: DeepSeek-V3 in small: hidden 128, 5 layers (the first dense), 4 heads (so 2 and 4 ranks can share them).
TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}

#: The vision tower is built by the engine but has no weights here: no picture ever reaches it.
VISION_CONFIG: dict[str, Any] = {
    "patch_size": 14,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 32,
    "text_hidden_size": TEXT_CONFIG["hidden_size"],
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    # Releases read the sizes of the tower under the one or the other name.
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vt_hidden_size": 32,
    "vt_num_attention_heads": 4,
    "vt_num_hidden_layers": 1,
    "vt_intermediate_size": 64,
}

PREPROCESSOR_CONFIG: dict[str, Any] = {
    "auto_map": {"AutoProcessor": f"{PROCESSOR.stem}.TinyKimiProcessor"},
    "media_proc_cfg": {
        "patch_size": VISION_CONFIG["patch_size"],
        "merge_kernel_size": 2,
        "in_patch_limit": 1024,
        "patch_limit_on_one_side": 64,
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


def sha256(path: Path) -> str:
    """Return the checksum of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_json(path: Path, data: Any) -> None:
    """Write data as JSON, the same bytes for the same data."""
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def fingerprint(arch: str, seed: int) -> dict[str, Any]:
    """Return all that decides the bytes of the folder."""
    return {
        "arch": arch,
        "seed": seed,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "sources": {path.name: sha256(path) for path in (Path(__file__), PROCESSOR)},
    }


def is_current(folder: Path, made_from: dict[str, Any]) -> bool:
    """Tell whether the folder was made from this and still holds what was written."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return record["made_from"] == made_from and all(
            sha256(folder / name) == checksum for name, checksum in record["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_weights(folder: Path, seed: int, prefix: str) -> None:
    """Write `model.safetensors`: bfloat16, each tensor's name behind the prefix.

    Matrices ~ N(0, 0.08), norm weights ~ N(1, 0.1) (so that a state before a norm is no multiple of the one
    after it), the router's correction bias ~ N(0, 0.1).
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    plain = {k: v for k, v in TEXT_CONFIG.items() if k not in ("architectures", "model_type", "torch_dtype")}
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**plain))
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
            else:
                parameter.normal_(1, 0.1)
        for name, buffer in sorted(model.named_buffers()):
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 0.1)
    # Hugging Face writes the tensors under the names and in the split that DeepSeek publishes.
    model.to(torch.bfloat16).save_pretrained(folder)
    for extra in folder.iterdir():
        if extra.name != "model.safetensors":
            extra.unlink()
    weights = folder / "model.safetensors"
    tensors = {prefix + name: tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})


def write_tokenizer(folder: Path) -> None:
    """Write a word-level tokenizer of VOCABULARY entries; the engine wants one beside a multimodal model."""
    words = [*SPECIAL_TOKENS, *(f"<t{index}>" for index in range(len(SPECIAL_TOKENS), VOCABULARY))]
    special = [
        {
            "id": index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, content in enumerate(SPECIAL_TOKENS)
    ]
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {word: index for index, word in enumerate(words)},
                "unk_token": "[UNK]",
            },
        },
    )
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "model_max_length": TEXT_CONFIG["max_position_embeddings"],
            "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
        },
    )


def write_model(folder: Path, arch: str, seed: int) -> None:
    """Write every file of the model but the record."""
    if arch == "deepseek_v3":
        write_weights(folder, seed, prefix="")
        write_json(folder / "config.json", TEXT_CONFIG)
        write_tokenizer(folder)
        return
    write_weights(folder, seed, prefix="language_model.")
    write_json(
        folder / "config.json",
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "bos_token_id": TEXT_CONFIG["bos_token_id"],
            "eos_token_id": TEXT_CONFIG["eos_token_id"],
            "pad_token_id": TEXT_CONFIG["pad_token_id"],
            "ignore_index": -100,
            "media_placeholder_token_id": MEDIA_PAD,
            "tie_word_embeddings": False,
            "torch_dtype": TEXT_CONFIG["torch_dtype"],
            "text_config": TEXT_CONFIG,
            "vision_config": VISION_CONFIG,
        },
    )
    write_tokenizer(folder)
    write_json(folder / "preprocessor_config.json", PREPROCESSOR_CONFIG)
    shutil.copyfile(PROCESSOR, folder / PROCESSOR.name)


def replace_folder(new: Path, place: Path) -> None:
    """Put a finished folder in its place; a reader sees the old one, for a moment none, or the new one."""
    old = place.with_name(f".{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        os.rename(place, old)
    os.rename(new, place)
    shutil.rmtree(old, ignore_errors=True)


def main() -> int:
    """Write the model folder unless it is there; print `changed` or `unchanged`."""
    parser = argparse.ArgumentParser(description="Write the tiny seeded model of the local engine.")
    parser.add_argument("folder", type=Path, help="folder of the model")
    parser.add_argument("--arch", choices=("kimi_k25", "deepseek_v3"), default="kimi_k25")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="say what would happen, write nothing")
    args = parser.parse_args()

    place: Path = args.folder.absolute()
    made_from = fingerprint(args.arch, args.seed)
    if is_current(place, made_from):
        print("unchanged")
        return 0
    if args.check:
        print("changed")
        return 0
    with locked(place.parent):
        if is_current(place, made_from):  # made while this one waited
            print("unchanged")
            return 0
        new = place.with_name(f".{place.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        write_model(new, args.arch, args.seed)
        files = {path.name: sha256(path) for path in sorted(new.iterdir())}
        for name in files:
            (new / name).chmod(0o644)
        write_json(new / RECORD, {"made_from": made_from, "files": files})
        replace_folder(new, place)
    print("changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The judge: Hugging Face's DeepseekV3 in float32, compared with an output folder. Nothing is stored.

    ENGINE_PYTHON hf_reference.py --model MODEL --dataset DATA.jsonl --output OUTPUT [--tolerance 1e-4]

Prints the largest absolute difference of every slot, exits 1 if one is above the tolerance or a sample is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file


def load_model(folder: Path) -> Any:
    """DeepseekV3ForCausalLM with the weights in ``folder``; Kimi-K2.5's ``language_model.`` prefix is taken off."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config") or config
    skipped = ("architectures", "model_type", "torch_dtype", "dtype")
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(**{key: value for key, value in config.items() if key not in skipped})
    )
    # from_pretrained's own way in would look for the prefix; the state dict is small enough to be put in by hand
    weights: Dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(str(path)).items():
            weights[name[len("language_model.") :] if name.startswith("language_model.") else name] = tensor
    weights = _as_modules_have_them(model, weights)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing:
        raise SystemExit("the checkpoint lacks {}".format(", ".join(missing[:5])))
    if unexpected:
        print("not part of the language model: {}".format(", ".join(unexpected[:5])))
    return model.to(torch.float32).eval()


def _as_modules_have_them(model: Any, weights: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Newer transformers hold a layer's experts in two tensors, checkpoints one by one: stack them where the model does."""
    own = model.state_dict()
    result = dict(weights)
    for name in own:
        if name in weights or ".experts." not in name:
            continue
        base, last = name.rsplit(".", 1)
        count = own[name].shape[0]
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        stacked = [
            torch.cat([result.pop("{}.{}.{}.weight".format(base, expert, part)) for part in parts])
            for expert in range(count)
        ]
        result[name] = torch.stack(stacked)
    return result


def states(model: Any, ids: List[int]) -> Tuple[List[torch.Tensor], torch.Tensor, torch.Tensor]:
    """(boundaries 0 .. layers-1, pre-norm final, post-norm final), each float32 [T, H].

    Hugging Face's last entry of hidden_states is normed, so the pre-norm state is caught at the norm's input.
    """
    caught: List[torch.Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda module, args: caught.append(args[0].detach()))
    try:
        with torch.no_grad():
            answer = model.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    finally:
        handle.remove()
    return [state[0] for state in answer.hidden_states[:-1]], caught[0][0], answer.last_hidden_state[0]


def read_rows(dataset: Path, cut_to: Optional[int]) -> Iterator[Tuple[int, List[int]]]:
    """(row number, token ids) of a JSON-lines data set."""
    with dataset.open(encoding="utf-8") as handle:
        for idx, line in enumerate(line for line in handle if line.strip()):
            yield idx, json.loads(line)["input_ids"][:cut_to]


def compare(model_folder: Path, dataset: Path, output: Path, limit: Optional[int] = None) -> Dict[str, float]:
    """Largest absolute difference of each slot over all samples of ``output``; FileNotFoundError where one is missing."""
    manifest = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
    boundaries, final = manifest["boundaries"], manifest["final"]
    model = load_model(model_folder)
    worst: Dict[str, float] = {}

    def note(what: str, left: torch.Tensor, right: torch.Tensor) -> None:
        if left.shape != right.shape:
            raise ValueError("{}: {} instead of {}".format(what, list(left.shape), list(right.shape)))
        difference = float((left.to(torch.float32) - right).abs().max())
        worst[what] = max(worst.get(what, 0.0), difference if difference == difference else float("inf"))

    for count, (idx, ids) in enumerate(read_rows(dataset, manifest["dataset"]["cut_to"])):
        if limit is not None and count >= limit:
            break
        with safe_open(str(output / "hidden_states" / "hs_{}.safetensors".format(idx)), framework="pt") as handle:
            found = {name: handle.get_tensor(name) for name in handle.keys()}
        if found["token_ids"].tolist() != ids:
            raise ValueError("sample {}: other token ids".format(idx))
        layers, pre, post = states(model, ids)
        hidden = found["hidden_states"]
        if hidden.shape[1] != len(boundaries) + 1:
            raise ValueError("sample {}: {} slots".format(idx, hidden.shape[1]))
        for slot, boundary in enumerate(boundaries):
            note("boundary {}".format(boundary), hidden[:, slot], layers[boundary])
        note(
            "final post-norm" if final == "post_norm" else "final pre-norm",
            hidden[:, -1],
            post if final == "post_norm" else pre,
        )
        if final == "both":
            note("final_post_norm", found["final_post_norm"], post)
        worst["samples"] = count + 1
    return worst


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare an output folder with Hugging Face's states.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--limit", type=int, help="compare the first samples only")
    options = parser.parse_args()
    try:
        worst = compare(options.model, options.dataset, options.output, options.limit)
    except (FileNotFoundError, ValueError) as error:
        print("not equal: {}".format(error))
        return 1
    samples = int(worst.pop("samples", 0))
    for what, difference in sorted(worst.items()):
        print("{:20s} {:.3g}".format(what, difference))
    largest = max(worst.values(), default=float("inf"))
    print("{} samples, max abs difference {:.3g} (tolerance {:.3g})".format(samples, largest, options.tolerance))
    return 0 if samples and largest <= options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())

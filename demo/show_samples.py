"""Shows what an extraction left: a few samples with their shapes and norms. Runs in the engine's Python (torch, safetensors)."""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors import safe_open


def main(output: Path) -> int:
    """Print every 16th sample: tokens, states [T, n, H], mean norm of each state."""
    files = sorted((output / "hidden_states").glob("hs_*.safetensors"), key=lambda path: int(path.stem[3:]))
    for path in files[::16]:
        with safe_open(str(path), framework="pt") as handle:
            ids, states = handle.get_tensor("token_ids"), handle.get_tensor("hidden_states")
        norms = ", ".join(f"{value:.1f}" for value in states.float().norm(dim=-1).mean(dim=0).tolist())
        print(
            f"{path.name:>22}: {len(ids):>5} tokens, states {list(states.shape)} {str(states.dtype)[6:]}, mean norms {norms}"
        )
    print(
        f"{len(files)} samples, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB; described in {output}/manifest.json"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

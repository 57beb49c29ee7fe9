"""Write a model as the local engine's own tool does, in another size: ``ENGINE_PYTHON bench/models.py FOLDER hidden_size=7168 ...``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "roles/local_engine/files/tools"))


def main() -> int:
    """The command line."""
    import make_model

    parser = argparse.ArgumentParser(description="Write a model of another size than the local engine's.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("changes", nargs="*", help="key=number of the text model's config.json")
    options = parser.parse_args()
    for change in options.changes:
        key, _, value = change.partition("=")
        if key not in make_model.TEXT_CONFIG:
            parser.error(f"no such key: {key}")
        make_model.TEXT_CONFIG[key] = int(value)
    make_model.VISION_CONFIG["text_hidden_size"] = make_model.TEXT_CONFIG["hidden_size"]
    options.folder.mkdir(parents=True)
    make_model.write_model(options.folder, "kimi_k25", seed=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())

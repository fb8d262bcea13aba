"""Implements the `megarl` command."""

"""Chooses the beginning of a run, saves checkpoints, and decides whether a run may use its folder."""

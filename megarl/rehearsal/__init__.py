"""Rehearses a run on CPU ranks of this machine: the same layout and steps with a model that is small."""

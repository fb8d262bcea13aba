"""Measures and shows a run: seconds per phase, metrics and their destinations, progress, sample rollouts, profiles."""

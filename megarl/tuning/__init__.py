"""Searches for settings: runs as trials of an Optuna study, which samples values and prunes."""

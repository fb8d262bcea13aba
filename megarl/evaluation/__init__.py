"""Evaluation of a model from samples: estimates with their uncertainty, files and comparisons."""

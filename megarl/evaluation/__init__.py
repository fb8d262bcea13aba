"""Evaluates a model from samples: makes estimates with their uncertainty, files and comparisons."""

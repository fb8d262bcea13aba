"""Compares a model as this program reads it with the same model in `transformers`: tensors, numbers, answers."""

"""Writes, reads and converts checkpoints."""

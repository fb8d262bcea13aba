"""Shares ranks between training and generation: the 3D-HybridEngine."""

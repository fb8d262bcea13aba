"""The 3D-HybridEngine."""

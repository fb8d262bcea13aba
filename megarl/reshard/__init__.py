"""The 3D-HybridEngine's reshard: the actor's weights from the training layout into the engine's parameters."""

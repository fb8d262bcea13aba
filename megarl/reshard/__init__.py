"""Moves the actor's weights from the training layout into the engine's parameters."""

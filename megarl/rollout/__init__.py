"""Generation: the engine protocol and the engines."""

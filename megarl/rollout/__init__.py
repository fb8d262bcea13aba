"""Generates responses: the engine protocol and the engines."""

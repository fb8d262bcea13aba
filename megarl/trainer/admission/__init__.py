"""Checks a run, and refuses it before any rank starts."""

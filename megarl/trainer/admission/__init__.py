"""Checks that refuse a run before any rank starts."""

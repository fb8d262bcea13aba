"""The `megarl` command."""

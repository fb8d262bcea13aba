"""Holds the mathematics of the algorithms: pure torch functions, no distributed calls, no Megatron."""

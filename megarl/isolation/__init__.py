"""Isolates programs that nobody trusts: with namespaces, limits, and a file system of its own.

`megarl.rewards.sandbox` starts `megarl.isolation.start`, a process of its own, for every such program. Imports here
cost each of these starts: nothing but C modules of Python, and `ctypes`.
"""

"""Calls verifiers of other packages: run by `megarl.workers.Child`, and imported by nobody else."""

"""Calls verifiers of others: run by `megarl.workers.Child`, and imported by nobody else."""

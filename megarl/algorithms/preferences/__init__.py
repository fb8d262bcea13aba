"""Holds preference losses: `algorithm.preference.loss_mode` names a file here, and the function of the same name in it.

Each is (the section `algorithm.preference`) -> a loss over pairs, the chosen response first.
"""

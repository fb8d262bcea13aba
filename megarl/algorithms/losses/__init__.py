"""Holds policy losses: `actor.policy_loss.loss_mode` names a file here, and the function of the same name in it.

Each is (the section `actor`) -> the loss of a policy update. Entropy and the KL to a reference are added to it
(`megarl.algorithms.regularizers`).
"""

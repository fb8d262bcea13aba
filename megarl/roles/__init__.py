"""Holds the models of a run with their duties: actor, critic, reference, reward model, teacher."""

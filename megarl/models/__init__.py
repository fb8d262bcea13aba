"""Builds the training layout's models, and the tables that say where every weight sits."""

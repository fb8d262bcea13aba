"""Holds the flows: functions over roles that say what a run does, each written as its algorithm is."""

"""Checks whether the machines of a run are fit for it: one report per node, one table, one exit
code."""

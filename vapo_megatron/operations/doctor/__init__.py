"""Whether the machines of a run are fit for it: one report a node, one table, one exit code."""

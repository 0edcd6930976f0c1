"""What a user with a GPU node runs first: `make gpu-check`. Every check is a process of its own
with a time limit.

The program that runs them imports the standard library alone, so that it also works where the
installation does not.
"""

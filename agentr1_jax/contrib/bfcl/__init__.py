"""BFCL: stateful tool use over several turns of a user, on our own implementation of the functions."""

"""Environments: what an action means for the task."""

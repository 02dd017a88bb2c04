"""Agents: the loop between policy and environment, and the rule that builds the next prompt."""

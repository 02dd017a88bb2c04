"""Tools: what can happen when an agent makes a call."""

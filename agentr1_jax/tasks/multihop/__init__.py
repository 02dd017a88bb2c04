"""Real multi-hop questions: the files they come from, their splits, and the Task."""

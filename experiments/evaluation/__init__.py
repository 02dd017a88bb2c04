"""What `experiments.evaluate` is made of: policies, modes, chunks of questions, figures, joined tables."""

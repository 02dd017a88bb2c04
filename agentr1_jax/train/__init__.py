"""The training loop: collect rollouts, take a train step, keep the run's progress. Plain dataclasses in, no config."""

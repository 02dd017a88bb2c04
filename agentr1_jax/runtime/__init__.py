"""What a run stands on: configs, processes, metrics, checkpoints, seeds."""

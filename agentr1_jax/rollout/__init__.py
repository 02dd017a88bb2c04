"""Rollouts: KV cache, compiled prefill and decode, the slot engine behind Session, the runner of many trajectories."""

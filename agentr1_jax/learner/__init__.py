"""The learner: packing of trajectories into rows, chunked log-probs, losses, the compiled update."""

"""The parts of `experiments.ablate`: the grid, what it costs, its processes, what they came to."""

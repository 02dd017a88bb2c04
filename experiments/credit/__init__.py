"""The parts of `experiments.credit_compare` and `experiments.gradient_bench`."""

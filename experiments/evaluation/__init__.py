"""Parts of `experiments.evaluate`: policies, modes, chunks of questions, results, tables of several evaluations."""

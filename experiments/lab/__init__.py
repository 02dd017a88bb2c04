"""The credit lab: training on small decision processes, compiled whole; `experiments/credit_lab.py` runs it."""

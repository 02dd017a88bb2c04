"""What a run leaves for people to look at: the trajectory inspector, the learning curve, tables."""

from agentr1_jax.report.curves import plot_learning_curve
from agentr1_jax.report.inspector import write_report
from agentr1_jax.report.tables import summary_table

__all__ = ["plot_learning_curve", "summary_table", "write_report"]

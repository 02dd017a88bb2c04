"""What a run leaves for people to look at: trajectory inspector, learning curve, timeline of slots, tables."""

from agentr1_jax.report.curves import plot_learning_curve
from agentr1_jax.report.inspector import write_report
from agentr1_jax.report.tables import summary_table
from agentr1_jax.report.timeline import plot_timeline, share_of_states

__all__ = ["plot_learning_curve", "plot_timeline", "share_of_states", "summary_table", "write_report"]

"""Reports of runs: trajectory inspector, learning curves, timeline of decode slots, comparisons, tables, statistics."""

from agentr1_jax.report.curves import plot_learning_curve
from agentr1_jax.report.inspector import PageHead, write_report
from agentr1_jax.report.tables import summary_table
from agentr1_jax.report.timeline import plot_timeline

__all__ = ["PageHead", "plot_learning_curve", "plot_timeline", "summary_table", "write_report"]

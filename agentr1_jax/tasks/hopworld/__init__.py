"""HopWorld: a procedural world of films and people, in the shape of HotpotQA."""

from agentr1_jax.tasks.hopworld.task import NO_FLAWS as NO_FLAWS
from agentr1_jax.tasks.hopworld.task import HopWorldTask as HopWorldTask

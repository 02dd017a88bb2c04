"""HopWorld: a procedural world of films and people, in the shape of HotpotQA."""

from agentr1_jax.envs.hopworld.expert import NO_FLAWS as NO_FLAWS
from agentr1_jax.envs.hopworld.task import HopWorldTask as HopWorldTask

"""Where a run goes on: its progress as a checkpoint stores it, and the batches that follow from it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from agentr1_jax.credit.shaping import RunningMeanStd
from agentr1_jax.errors import UserError
from agentr1_jax.train.phases import Examples
from agentr1_jax.train.progress import Progress, read_progress
from agentr1_jax.trajectory import Outcome, Trajectory

EXAMPLES, SIZE, UPDATES = 10, 3, 8  # Epochs of 3 updates: one ends at 3, and one at 6.


def stored(progress: Progress) -> Progress:
    """The progress by way of a checkpoint's JSON."""
    return read_progress(json.loads(json.dumps(dataclasses.asdict(progress))), "the run")


def test_a_checkpoint_keeps_the_progress():
    progress = Progress("rl", kl_coef=0.5).after(5, RunningMeanStd(10.0, 0.5, 3.0)).add_results(em_before=0.25)
    progress = progress.add_totals({"time/learn": 2.0}, recompiles=1)
    again = stored(progress)
    assert again.replace(return_statistics=RunningMeanStd(*again.return_statistics)) == progress
    assert (again.update, again.prompt_index, again.checkpoint) == (1, 5, 1)
    assert again.enter("done").checkpoint == 2


@pytest.mark.parametrize(("number", "message"), [(9, "have format 9, this version knows 3"), (2, "of version 0.1.0")])
def test_a_checkpoint_of_another_version_is_refused(number, message):
    with pytest.raises(UserError, match=f"runs/x: its checkpoints have format {number}|{message}"):
        read_progress(dataclasses.asdict(Progress()) | {"format": number, "what": "is this"}, "runs/x")


def test_imitation_goes_on_with_the_next_examples_also_between_epochs():
    examples = [
        Trajectory(uid=str(i), group=i, sample=0, task="t", seed=0, steps=(), outcome=Outcome.ENV_DONE)
        for i in range(EXAMPLES)
    ]

    def batches(updates):
        progress, out = Progress("warm_start"), []
        for update in updates:
            source = Examples(examples, SIZE, seed=3)  # As after a restart.
            progress = stored(progress.replace(update=update))
            out.append([t.uid for t in source.next({}, progress, stop=None).trajectories])
        return out

    straight = batches(range(UPDATES))
    for epoch in range(0, UPDATES, 3):
        drawn = [uid for batch in straight[epoch : epoch + 3] for uid in batch]
        assert len(set(drawn)) == len(drawn) == SIZE * len(straight[epoch : epoch + 3])
    assert len({tuple(sorted(x)) for x in straight}) > 3, "each epoch has an order of its own"
    assert batches([4]) == [straight[4]]

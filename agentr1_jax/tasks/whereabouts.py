"""Whereabouts: reports of who went where, one at a time, and at the end the question where somebody is.

A context that keeps everything answers from it; one that drops old reports cannot; one that is summed up can, if the
summaries keep who is where:

    The wind turns. Ann to mill, Bob to barn.        go on
    The old dog sleeps. Cid to lake, Ann to pond.    go on        (a summary: Bob barn, Cid lake, Ann pond)
    ...
    Where is Bob?                                    Bob barn
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Annotated

from annotated_types import Ge, Le
from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import SUMMARY_REQUEST, Action, Expert, Observation, Row, Transition
from agentr1_jax.envs.datasets import ProceduralTask
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.trajectory import Outcome
from agentr1_jax.validation import STRICT, Count, Fraction

PEOPLE = ("Ann", "Bob", "Cid", "Dan", "Eve", "Fay", "Gus", "Hal", "Ida", "Jon", "Kim", "Leo")
PLACES = ("mill", "barn", "lake", "pond", "hill", "farm", "camp", "cave", "dock", "fort", "well", "yard")
REMARKS = (
    "The wind turns and the old dog sleeps by the door.",
    "It rains all night and the river is high again.",
    "A cart of apples stands in the road till noon.",
    "The bell rings twice but nobody knows the reason why.",
    "Some geese fly over the roof and then it snows.",
)
"""What reports say besides; it matters to nobody."""
RULES = "Reports follow of who goes where. At the end somebody will be asked for."
GO_ON = "go on"
LAST = "Where is {}?"
FACT = re.compile(r"([A-Z]\w*) (\w+)")


@dataclass(frozen=True, config=STRICT)
class WhereaboutsRewards:
    """Weights of the reward parts of Whereabouts."""

    answer: float = 1.0
    """of person and right place"""
    summary: float = 0.2
    """of each summary: the share of people whom it has where they are, less that of those whom it has elsewhere"""


@dataclass(frozen=True, config=STRICT)
class WhereaboutsConfig:
    """Keys of `task.whereabouts`."""

    people: Annotated[int, Ge(2), Le(len(PEOPLE))] = 6
    """people who move"""
    places: Annotated[int, Ge(2), Le(len(PLACES))] = 8
    """places where they can be"""
    reports: Annotated[int, Ge(1), Le(64)] = 10
    """reports before the question"""
    moves: Count = 1
    """people who move in a report in which nobody moves for the last time; at most `people`"""
    forgets: Fraction = 0.25
    """probability that a summary of the expert leaves out somebody"""
    mistakes: Fraction = 0.1
    """probability that the expert's answer is a guess"""
    rewards: WhereaboutsRewards = WhereaboutsRewards()
    """weights of the reward parts"""

    def __post_init__(self) -> None:
        if self.moves > self.people:
            raise ValueError(f"moves ({self.moves}) is more than people ({self.people}); lower it")


@register("whereabouts", WhereaboutsConfig)
def make_whereabouts(config: WhereaboutsConfig, run: TaskContext) -> ProceduralTask:
    """Make Whereabouts. Raises ValueError where the budget ends an episode before its question."""
    steps = config.reports + 1
    why = f"its question comes at step {steps} (task.whereabouts.reports + 1)"
    run.check_steps(steps, "whereabouts", why, "lower task.whereabouts.reports")
    return ProceduralTask(
        name="whereabouts",
        splits=("train", "eval", "dev"),
        make_row=functools.partial(_make_row, config),
        make_env=lambda: WhereaboutsEnv(config.rewards),
        reward_parts=list(dataclasses.asdict(config.rewards)),
        make_expert=functools.partial(_make_expert, config),
        make_texts=functools.partial(_make_texts, config),
        expert_writes_summaries=True,
    )


def _make_row(config: WhereaboutsConfig, split: str, index: int) -> Row:
    """Everybody moves for the last time in a report that is uniform over all, so that old ones count as new ones do."""
    name = f"whereabouts/{split}/{index}"
    rng = random.Random(name)
    people, places = PEOPLE[: config.people], PLACES[: config.places]
    last = {who: rng.randrange(config.reports) for who in people}
    reports = []
    for number in range(config.reports):
        movers = [who for who in people if last[who] == number]
        later = [who for who in people if last[who] > number]
        movers = movers or rng.sample(later, min(config.moves, len(later)))
        reports.append({who: rng.choice(places) for who in rng.sample(movers, len(movers))})
    asked = rng.choice(people)
    return {
        "id": name,
        "question": RULES,
        "reports": reports,
        "remarks": [rng.choice(REMARKS) for _ in reports],
        "asked": asked,
        "answers": [last_places(reports)[asked]],
        "age": config.reports - 1 - last[asked],
    }


def _make_texts(config: WhereaboutsConfig) -> Iterator[str]:
    """Stories of training rows, one a text: after each second report, who is where, a question and its answer."""
    yield from [RULES, GO_ON, SUMMARY_REQUEST]
    for index in itertools.count():
        row, story = _make_row(config, "train", index), list[str]()
        rng = random.Random(f"{row['id']}/story")
        for number in range(config.reports):
            story.append(report_text(row, number))
            if number % 2 or number == config.reports - 1:
                facts = last_places(row["reports"][: number + 1])
                who = rng.choice(list(facts))
                story += [facts_text(facts), LAST.format(who), facts_text({who: facts[who]})]
        yield "\n".join(story)


class WhereaboutsEnv:
    """One episode: every response but the last is passed over, that one is the answer."""

    def __init__(self, rewards: WhereaboutsRewards) -> None:
        self._rewards = rewards

    async def reset(self, row: Row, seed: int) -> Observation:
        """Start an episode; `seed` is not used."""
        self._row, self._shown, self._right = row, 1, 0.0
        self._summaries: list[float] = []
        opening = f"{row['question']}\n{report_text(row, 0)}"
        return Observation(messages=[{"role": "user", "content": opening}], state_key=self._key(), evidence="")

    async def step(self, action: Action) -> Transition:
        """Show the next report, then the question; what is said to that ends the episode."""
        reports = self._row["reports"]
        if self._shown > len(reports):
            right = facts_text({self._row["asked"]: self._row["answers"][0]})
            self._right = float(action.text.strip().strip(".") == right)
            reward = self._rewards.answer * self._right
            return Transition(
                observation=None,
                reward=reward,
                reward_parts={"answer": reward},
                raw_reward_parts={"answer": self._right},
                terminated=True,
                outcome=Outcome.ANSWERED,
                metrics=self.truncate(),
            )
        self._shown += 1
        over = self._shown > len(reports)
        text = LAST.format(self._row["asked"]) if over else report_text(self._row, self._shown - 1)
        facts = facts_text(last_places(reports[: self._shown]))
        evidence = f"{facts}\n{text}" if over else facts
        return Transition(Observation(text=text, role="user", state_key=self._key(), evidence=evidence), 0.0)

    def judge_summary(self, text: str) -> Mapping[str, float]:
        """Return the reward parts of a summary of all but the newest report."""
        score = score_summary(text, last_places(self._row["reports"][: self._shown - 1]))
        self._summaries.append(score)
        return {"summary": self._rewards.summary * score}

    def truncate(self) -> Mapping[str, float]:
        """Return `em`; `summary_score`, the mean score of the summaries, where some were written."""
        found = {"summary_score": sum(self._summaries) / len(self._summaries)} if self._summaries else {}
        return {"em": self._right, **found}

    def _key(self) -> str:
        return f"{self._row['id']}|{self._shown}"


def last_places(reports: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return where everybody is after these reports; who moved last comes last."""
    facts: dict[str, str] = {}
    for report in reports:
        for who, place in report.items():
            facts.pop(who, None)
            facts[who] = place
    return facts


def report_text(row: Row, number: int) -> str:
    """Return a report in words."""
    moves = ", ".join(f"{who} to {place}" for who, place in row["reports"][number].items())
    return f"{row['remarks'][number]} {moves or 'Nobody moves'}."


def facts_text(facts: Mapping[str, str]) -> str:
    """Return facts as a summary has them."""
    return ", ".join(f"{who} {place}" for who, place in facts.items())


def score_summary(text: str, facts: Mapping[str, str]) -> float:
    """(facts that a summary has − people whom it has elsewhere) / facts, where the last word on somebody counts."""
    said = dict(FACT.findall(text))
    right = sum(said.get(who) == place for who, place in facts.items())
    return (right - (len(said) - right)) / max(len(facts), 1)


def _make_expert(config: WhereaboutsConfig, row: Row, seed: int) -> Expert:
    """Go on, sum up and answer, with the flaws of the config."""
    return _play(config, row, random.Random(f"{row['id']}/expert/{seed}")).send  # type: ignore[return-value]


def _play(config: WhereaboutsConfig, row: Row, rng: random.Random) -> Generator[str, str | None, None]:
    shown: str | None = None
    for number in itertools.count():  # Of responses to reports.
        if shown == SUMMARY_REQUEST:
            facts = last_places(row["reports"][:number])
            said = {who: place for who, place in facts.items() if rng.random() >= config.forgets}
            shown = yield facts_text(said) or GO_ON
        if number >= len(row["reports"]):
            guesses = rng.random() < config.mistakes
            place = rng.choice(PLACES[: config.places]) if guesses else row["answers"][0]
            yield facts_text({row["asked"]: place})
        shown = yield GO_ON

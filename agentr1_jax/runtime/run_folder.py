"""Run folder: the files of a run, its config and its trajectories.

    config.json                          resolved config and format of the folder
    metrics.jsonl                        one record per update and evaluation (`runtime/metrics.py`)
    checkpoints/NUMBER/                  state of the learner and progress of the run (`runtime/checkpoint.py`)
    trajectories/NAME.jsonl.gz           trajectories of a run of one process
    trajectories/NAME.pN.jsonl.gz        trajectories of process N of several
    pending/NUMBER.pN.jsonl.gz           pending rollouts of process N, beside checkpoint NUMBER

NAME is `rl_000012` for the RL batch of update 12, else the name of an evaluation, or `demonstrations`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from agentr1_jax import files
from agentr1_jax.errors import VARIABLE, UserError, user_error
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.config import flatten, hide_credentials_of_urls, is_url
from agentr1_jax.runtime.lock import NAME as LOCK_NAME
from agentr1_jax.trajectory import Trajectory
from agentr1_jax.trajectory_io import read_jsonl, write_jsonl

FORMAT = 3
"""Format of run folders, stored in config.json; it grows when an earlier version could not read a folder."""
EARLIER = "agentr1_jax 0.1.0, commit 41ce720"
"""Version that wrote run folders without a format."""
RESUMABLE = (
    "run_dir",
    "mesh",
    "processes",
    "checkpoint.every",
    "checkpoint.keep",
    "compilation_cache",
    "profile_updates",
    "sinks",
    "hardware",
    "policy.attention",
    "policy.remat",
    "rollout.tensor",
    "rollout.slots",
    "rollout.swap_slots",
    "rollout.slot_tokens",
    "rollout.decode_chunk",
    "rollout.early_exit_after",
    "rollout.fetch_lag",
    "rollout.prefill_width",
    "rollout.prefill_rows",
    "rollout.attention_block",
    "rollout.attention_group",
    "rollout.cache",
    "rollout.page_tokens",
    "rollout.pages",
    "loss.chunk",
    "learner.rows",
    "pretrain.rows",
)
"""Keys and sections that a later start of the same run may change: where it runs and how it is laid out there, which
changes results by rounding alone."""

CODE_FILES = ("task.file", "context.file", "credit.file")
"""Keys that name Python files, which are executed by whatever makes a run's parts from its config."""
CODE_MODULES = ("task.gymnasium.id", "task.multihop.reward_functions", "task.verifiers.source")
"""Keys that name Python modules, with more behind a colon; where it ends in .py, a file."""
PROBE = ".shared"
"""File by which `check_common_folder` finds out whether all processes see one folder."""

BEFORE_CONFIG = {LOCK_NAME, PROBE, "tokenizer.model"} | {
    f"{name}.partial" for name in (PROBE, "tokenizer.model", "config.json")
}
"""Files that a start may leave in the folder if it is killed before it has written config.json."""
SHARED_SECONDS = 5.0
"""How long a process looks for a file that another one wrote: network file systems may be late to show it."""

_FILE = re.compile(r"(?P<name>[^.]+)(\.p\d+)?\.jsonl\.gz")
_BATCH = re.compile(r"rl_(\d+)")


def batch_name(update: int) -> str:
    """Return the name of the RL batch of an update, counted from 0."""
    return f"rl_{update:06d}"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Folder of one run, on a disk or in a bucket; it need not exist yet."""

    path: str

    def file(self, *names: str) -> str:
        """Return the path of a file in the folder, e.g. `file("metrics.jsonl")`."""
        return os.path.join(self.path, *names)

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Write the resolved config of the run and the format of the folder to config.json; makes the folder."""
        with files.atomic_write(self.file("config.json")) as out:
            json.dump({"format": FORMAT, **values}, out, indent=2, sort_keys=True, ensure_ascii=False)
            out.write("\n")

    def read_config(self) -> dict[str, Any]:
        """Read the resolved config of the run.

        Raises UserError if the folder holds no run, a damaged one, or one of another version of the code.
        """
        path = self.file("config.json")
        try:
            values = json.loads(files.read_bytes(path))
            found = values.pop("format", None)
        except FileNotFoundError:
            raise UserError(f"{self.path}: no run (it has no config.json)") from None
        except (ValueError, AttributeError, TypeError) as error:
            raise UserError(f"{path}: not a config ({error}); restore it or choose another --config.run_dir") from error
        if found != FORMAT:
            raise UserError(
                f"{self.path}: the run folder has the format {found or f'of {EARLIER}'}, this version reads {FORMAT}; "
                "install the version that wrote it (CHANGELOG.md) to go on, or choose another --config.run_dir"
            )
        if values.get("policy", {}).get("weights") and not values.get("tokenizer", {}).get("path"):
            raise UserError(
                f"{self.path}: its policy has published weights and a tokenizer trained for the run, whose ids meant "
                "other words to them; start it again, in another --config.run_dir, with the weights' own tokenizer"
            )
        return values

    def risks(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return what a config that came with this folder could do to whoever uses it, by its keys.

        That is: execute Python that may have come with the folder, and send environment variables to a URL. Python in
        the working directory, from where it can be imported anyway, is taken for the user's own, but for the folder
        there that holds the run: for a run in runs/one, all of runs.
        """
        here, around = os.getcwd(), os.path.realpath(self.path)
        if _is_in(around, here) and around != here:
            around = os.path.join(here, os.path.relpath(around, here).partition(os.sep)[0])

        def is_foreign(path: str) -> bool:
            path = os.path.realpath(os.path.expanduser(path))
            return _is_in(path, around) or not _is_in(path, here)

        def is_risk(key: str, text: str) -> bool:
            if key in CODE_FILES or (key in CODE_MODULES and text.endswith(".py")):
                return is_foreign(text)
            if key in CODE_MODULES:  # Others than those of the working directory are installed.
                package = re.split("[.:]", text)[0]
                return any(os.path.exists(path) and is_foreign(path) for path in (package, f"{package}.py"))
            return is_url(text) and re.search(VARIABLE, text) is not None

        found = dict[str, str]()
        for key, value in flatten(values):
            texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text]
            if any(is_risk(key, text) for text in texts):
                found[key] = ", ".join(texts)
        return found

    def check_same_config(self, values: Mapping[str, Any], may_differ: Sequence[str] = RESUMABLE) -> bool:
        """Return True if the folder holds a run of this resolved config, which can be resumed; False if none has begun.

        A run begins with its first record of metrics or its first checkpoint. Before that it may have any config: a
        start that failed early leaves the folder free for the corrected command. Credentials in URLs may have changed.

        Args:
          values: resolved config of this start.
          may_differ: dotted keys and sections that a later start of the same run may change.

        Raises:
          UserError: the folder holds other files, or a run of another config (the differing keys are listed) or of
            another version of the code.
        """
        if not files.exists(self.file("config.json")):
            if set(files.list_names(self.path)) - BEFORE_CONFIG:
                raise UserError(f"{self.path}: not empty and without config.json; choose another --config.run_dir")
            return False
        stored, current = (
            dict(flatten(hide_credentials_of_urls(x, variables=True))) for x in (self.read_config(), values)
        )
        if not self._has_begun():
            return False
        missing = "(no such key)"
        differing = [
            f"  {key}: {stored.get(key, missing)!r} there, {current.get(key, missing)!r} here"
            for key in sorted(stored.keys() | current.keys())
            if stored.get(key, missing) != current.get(key, missing)
            and not any(key == free or key.startswith(f"{free}.") for free in may_differ)
        ]
        if differing:
            raise UserError(
                "\n".join([f"{self.path} holds a run of another config:", *differing])
                + "\nchoose another --config.run_dir, or start with the old values to resume it"
            )
        return True

    def _has_begun(self) -> bool:
        """Return True if the folder has anything that a run has computed."""
        metrics = self.file("metrics.jsonl")
        return (
            any(name.isdecimal() for name in files.list_names(self.file("checkpoints")))
            or (files.exists(metrics) and files.path(metrics).stat().length > 0)
            or files.exists(self.file("summary.json"))
        )

    def write_trajectories(self, name: str, trajectories: Iterable[Trajectory]) -> None:
        """Write this process's trajectories of one name.

        Process 0 removes files of that name which a start with another number of processes wrote.
        """
        own, count = processes.process_index(), processes.process_count()
        written = [f"{name}.p{process}.jsonl.gz" for process in range(count)] if count > 1 else [f"{name}.jsonl.gz"]
        write_jsonl(self.file("trajectories", written[own]), trajectories)
        if own == 0:
            for path in self.trajectory_files().get(name, ()):
                if os.path.basename(path) not in written:
                    files.remove(path)

    def trajectory_files(self) -> dict[str, list[str]]:
        """Return the paths of the trajectory files of each name, in the order of names and processes."""
        paths = dict[str, list[str]]()
        for file in files.list_names(self.file("trajectories")):
            if match := _FILE.fullmatch(file):
                paths.setdefault(match["name"], []).append(self.file("trajectories", file))
        return dict(sorted(paths.items()))

    def batch_files(self) -> dict[int, list[str]]:
        """Return the paths of the trajectory files of each RL batch, by its update. Raises UserError if none exists."""
        by_name = self.trajectory_files().items()
        by_update = {int(match[1]): paths for name, paths in by_name if (match := _BATCH.fullmatch(name))}
        if not by_update:
            raise UserError(f"{self.path}: has recorded no RL batch yet (trajectories/rl_*.jsonl.gz)")
        return by_update

    def recorded_batches(self, updates: Sequence[int]) -> dict[int, list[str]]:
        """Return the paths of some RL batches by update, the newest first; -1 stands for the newest batch.

        Raises UserError if one of them is not recorded.
        """
        recorded = self.batch_files()
        first, newest = min(recorded), max(recorded)
        wanted = sorted({newest if update == -1 else update for update in updates}, reverse=True)
        for update in wanted:
            if update not in recorded:
                raise UserError(f"{self.path}: has no RL batch {update}; those from {first} to {newest} are recorded")
        return {update: recorded[update] for update in wanted}

    def write_pending(self, number: int, trajectories: Sequence[Trajectory]) -> None:
        """Write this process's pending rollouts, before the checkpoint of that number; replaces an earlier file."""
        path = self.file("pending", f"{number}.p{processes.process_index()}.jsonl.gz")
        if trajectories:
            write_jsonl(path, trajectories)
        elif files.exists(path):
            files.remove(path)

    def read_pending(self, number: int) -> list[Trajectory]:
        """Read the pending rollouts of all processes beside a checkpoint; skip damaged files with a warning."""
        trajectories: list[Trajectory] = []
        for name in self._pending_names():
            if name.startswith(f"{number}.p"):
                try:
                    trajectories += list(read_jsonl(self.file("pending", name)))
                except ValueError as error:
                    logging.warning("%s; its groups are sampled again", error)
        return trajectories

    def remove_pending_after(self, number: int) -> None:
        """Remove pending rollouts of all processes beside checkpoints after this one, which the run resumes from."""
        for name in self._pending_names():
            if int(name.partition(".")[0]) > number:
                files.remove(self.file("pending", name))

    def remove_pending_except(self, numbers: Sequence[int]) -> None:
        """Remove this process's pending rollouts beside checkpoints other than these.

        Process 0 also removes the files of processes that this start does not have.
        """
        own, count = processes.process_index(), processes.process_count()
        for name in self._pending_names():
            number, process = name.removesuffix(".jsonl.gz").split(".p")
            mine = int(process) == own or (own == 0 and int(process) >= count)
            if mine and int(number) not in numbers:
                files.remove(self.file("pending", name))

    def _pending_names(self) -> list[str]:
        return fnmatch.filter(files.list_names(self.file("pending")), "*.p*.jsonl.gz")


def _is_in(path: str, folder: str) -> bool:
    """Return True if a path lies in a folder; both are absolute and without links."""
    return os.path.commonpath([path, folder]) == folder


def read_trajectories(paths: Sequence[str]) -> list[Trajectory]:
    """Read all trajectories of some files. Raises UserError, which names the file and the line that cannot be read."""
    with user_error():
        return [trajectory for path in paths for trajectory in read_jsonl(path)]


def check_common_folder(folder: str) -> None:
    """Refuse a run folder that is not the same folder for all processes. Collective.

    Raises:
      UserError: in all processes; the message names those that do not see what process 0 writes, and where they look.
    """
    if processes.process_count() == 1:
        return
    first, path = processes.process_index() == 0, os.path.join(folder, PROBE)
    token = processes.all_gather_json(secrets.token_hex(8))[0]
    if first:
        with files.atomic_write(path) as out:
            out.write(token)
    processes.barrier()
    place = f"{files.absolute_path(folder)} on {socket.gethostname()}"
    answers = processes.all_gather_json([_fault_of_probe(path, token), place])
    if first:
        files.remove(path)
    blind = [f"process {index} ({where}: {fault})" for index, (fault, where) in enumerate(answers) if fault]
    if blind:
        raise UserError(
            f"{folder}: not all processes share this folder: what process 0 writes ({answers[0][1]}) is not seen by "
            f"{', '.join(blind)}. Give a --config.run_dir on a file system that all hosts mount at one path, or "
            "gs://BUCKET/FOLDER"
        )


def _fault_of_probe(path: str, token: str) -> str:
    """Return why there is no file with this token, "" if there is one."""
    deadline = time.monotonic() + SHARED_SECONDS
    while True:
        try:
            if files.read_bytes(path).decode() == token:
                return ""
            fault = "another run wrote it"
        except UserError:
            raise
        except Exception as error:  # Bucket clients raise exceptions of their own.
            fault = f"{type(error).__name__}: {error}"
        if time.monotonic() >= deadline:
            return fault
        time.sleep(0.1)

"""Check of a run for other machines, before they are asked for: `--check=v5e:4x4` is four processes of four v5e chips.

The launchers call it with the data folder of the workers in `AGENTR1_DATA`. Nothing is written, and no device is asked.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train.settings import Settings
from experiments.checks import check_placement, check_task
from experiments.plan import describe_cost, parse_speeds
from experiments.setup import Config, complete, make_task, read_settings

NO_DATA = "(no --data)"
"""Data folder of a run that was given none: it must not fall back to a folder of this machine."""


@dataclasses.dataclass(frozen=True)
class Device:
    """Device of a machine that is not here, with what the checks of a placement read."""

    process_index: int
    slice_index: int
    platform: str
    device_kind: str


def parse_devices(shape: str) -> list[Device]:
    """Return the devices of `KIND:PROCESSESxDEVICES`, or of several TPU slices, `KIND:SLICES*PROCESSESxDEVICES`.

    KIND is a generation of TPUs or `gpu`.

    Raises:
      UserError: the text has another form.
    """
    match = re.fullmatch(r"(v4|v5e|v5p|v6e|gpu):(?:([1-9]\d*)\*)?([1-9]\d*)x([1-9]\d*)", shape)
    if not match:
        raise UserError(
            f"--check={shape}: write KIND:PROCESSESxDEVICES, e.g. v5e:4x4 or gpu:2x8; v5e:2*4x4 is two slices"
        )
    kind = (match[1], match[1]) if match[1] == "gpu" else ("tpu", f"TPU {match[1]}")
    slices, processes, devices = (int(number or 1) for number in match.groups()[1:])
    places = [(s * processes + p, s) for s in range(slices) for p in range(processes)]
    return [Device(*place, *kind) for place in places for _ in range(devices)]


def show(runs: Sequence[Config], shape: str, speeds: Sequence[str] = ()) -> None:
    """Check runs and print what was found; see `check`. `speeds` are the values of `--tokens_per_second`."""
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # A bucket that cannot be read from here is one line of ours.
    for line in check(runs, shape, parse_speeds(speeds)):
        Console().print(f"check: {line}", markup=False, highlight=False, soft_wrap=True)


def check(runs: Sequence[Config], shape: str, speeds: Sequence[float] = ()) -> Iterator[str]:
    """Check runs, each on these devices; yield what was found, a line each.

    Args:
      runs: configs.
      shape: devices of each run; see `parse_devices`.
      speeds: tokens decoded and learned per second, for an estimate of the time; empty if they are unknown.

    Raises:
      UserError: what the workers would refuse.
    """
    devices: Any = parse_devices(shape)
    runs = [complete(config, devices) for config in runs]
    settings = [read_settings(config) for config in runs]
    for each, config in zip(settings, runs, strict=True):
        check_placement(each, devices)
        yield _check_run_folder(each.run.run_dir, config)
    for first in [each for i, each in enumerate(settings) if each.task not in [s.task for s in settings[:i]]]:
        yield _check_data([each for each in settings if each.task == first.task])
    for each in settings:
        yield f"{each.run.run_dir}: {describe_cost(each, len(devices), speeds)}"


def _check_run_folder(run_dir: str, config: Config) -> str:
    """Refuse a folder that holds another run."""
    try:
        resumes = RunFolder(run_dir).check_same_config(configs.resolve(config))
    except UserError:
        raise
    except Exception as error:  # gcsfs, aiohttp and google-auth each raise their own exceptions.
        return f"{run_dir}: not read from here ({type(error).__name__}); the workers check it"
    return f"{run_dir}: {'resumes' if resumes else 'a new run, as seen from here'}"


def _check_data(settings: Sequence[Settings]) -> str:
    """Refuse a data folder that lacks what the task of these runs reads, where this machine can see it."""
    folder = settings[0].task.data_dir or os.environ.get("AGENTR1_DATA", "")
    if files.is_remote(folder):
        try:
            names = files.list_names(folder)
        except Exception as error:  # As above; the workers may have other rights.
            return f"{folder}: not read from here ({type(error).__name__}); the workers check it"
        if not names:
            raise UserError(f"--data={folder}: no such folder in the bucket, or an empty one")
        return f"{folder}: has {', '.join(names)}; the workers check the files"
    if folder and not os.path.isdir(folder):
        return f"{folder}: not on this machine; the workers check it"
    here = [dataclasses.replace(s, task=dataclasses.replace(s.task, data_dir=folder or NO_DATA)) for s in settings]
    task = make_task(here[0], ToolMetrics())
    for each in here:
        check_task(each, task)
        tokenizer = each.tokenizer.path.replace("{data}", folder or NO_DATA)
        if "{data}" in each.tokenizer.path and not os.path.exists(tokenizer):
            raise UserError(f"tokenizer.path: {tokenizer} is not there; --data must name the folder that holds it")
    return f"{folder}: has what the task reads" if folder else "the task reads no data folder"

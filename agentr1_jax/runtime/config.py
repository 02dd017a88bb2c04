"""Configs: `get_config()` files and overrides on the command line.

A config file starts from `configs/base.py`, whose `get_config()` returns a locked `ConfigDict`: a key that does not
exist there is an error wherever it is written. This module does not import JAX, so that mistakes are reported at once.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import errno
import functools
import importlib.util
import itertools
import logging as python_logging
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import ml_collections
import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags

from agentr1_jax.errors import DISK_FULL, UserError, hide_credentials, inert, user_error
from agentr1_jax.registry import parse_call
from agentr1_jax.runtime.synonyms import NO_COUNTERPART, SYNONYMS

HELP = """\
--config=FILE        the config to start from, e.g. --config=configs/quickstart.py
--config.a.b=value   another value of a key, e.g. --config.updates=20; docs/config.md lists every key
--keys[=section]     with --config: print every key with its value, its default and where it was set, and leave

"""
"""First lines of `--help`."""
T = TypeVar("T")
_CONFIG = re.compile(r"--?config(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)
_KEYS = re.compile(r"--?keys(?:=(.*))?")
UNUSABLE_PATH = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}
"""Values of `OSError.errno` for a path that the user has to change, or whose permissions."""
EXIT_SECONDS = 30.0
"""Time that threads of user code, which nobody can stop, have to end by themselves when a program ends."""
LOST_PROCESS_SECONDS = 120
"""Longest wait until JAX names a lost process and ends this one; longer than a sensible `heartbeat_seconds`."""


@dataclasses.dataclass(frozen=True)
class Given:
    """The config of a command.

    Attributes:
      path: of the config file, with its argument.
      config: with the overrides of the command line.
      overrides: dotted keys that the command line sets.
      notes: what the overrides of other keys have changed, a line each.
    """

    path: str
    config: ml_collections.ConfigDict
    overrides: Sequence[str]
    notes: Sequence[str]


Adapt = Callable[[ml_collections.ConfigDict, Mapping[str, Any]], tuple[ml_collections.ConfigDict, Sequence[str]]]
ShowKeys = Callable[[Given, str], None]


def define_config_flag() -> flags.FlagHolder[ml_collections.ConfigDict]:
    """Define `--config=FILE.py[:argument]` and its overrides `--config.a.b=value`; `.value` is the locked config."""
    return config_flags.DEFINE_config_file("config", None, "path of a config file", lock_config=True)


def define_trust_flag() -> None:
    """Define `--trust_run`, of commands that make the parts of a run from its config; see `trusts_run`."""
    flags.DEFINE_bool("trust_run", False, "do without asking what may be unsafe if the run is not your own")


def trusts_run() -> bool:
    """Return True if the command has `--trust_run`."""
    return "trust_run" in flags.FLAGS and bool(flags.FLAGS["trust_run"].value)


def run_main(
    main: Callable[[Sequence[str]], Any],
    arguments: Sequence[str] = (),
    adapt: Adapt | None = None,
    show_keys: ShowKeys | None = None,
) -> None:
    """Run `main(argv)` as `absl.app.run` does, but report a user's mistake by one message and exit status 2.

    One process of several exits at once when it fails: `jax.distributed` would let it wait at exit for the others,
    which wait for it in a collective. Threads of user code that do not end are left behind: see `EXIT_SECONDS`.

    Args:
      main: function of the positional arguments, the name of the program first.
      arguments: names of the positional arguments; optional ones in brackets, and the last one followed by three dots
        if it may be repeated. A command that has any needs no `--config`.
      adapt: (config of the file, overrides of the command line) -> a config that they fit, and what was changed for
        that, a line each, which is logged.
      show_keys: (config of the command, section) prints what `--keys[=section]` asks for.
    """
    one_of_many = "AGENTR1_COORDINATOR" in os.environ
    status = 2
    parser = functools.partial(parse_flags, arguments=arguments, adapt=adapt, show_keys=show_keys)
    try:
        app.run(main, flags_parser=parser)
    except SystemExit as error:  # So it ends.
        _watch_exit(error.code if isinstance(error.code, int) else int(error.code is not None))
        raise
    except UserError as error:
        _print_error(str(error))
        status = error.status
    except (Exception, KeyboardInterrupt) as error:
        if message := _file_system_message(error) or _memory_message(error):
            _print_error(message)
        elif one_of_many:
            status = 1
            traceback.print_exc()
            sys.stderr.flush()
            if "gloo" in str(error).lower():  # A collective failed: the launcher must see the lost process end first.
                time.sleep(LOST_PROCESS_SECONDS)
        else:
            _watch_exit(1)
            raise
    if one_of_many:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    _watch_exit(status)
    sys.exit(status)


def _watch_exit(status: int) -> None:
    """Have the program end soon, though Python joins all threads at its end that are no daemons, and those of pools."""
    main = threading.main_thread()

    def leave() -> None:
        stack = traceback.extract_stack(sys._current_frames().get(main.ident or 0))
        if not any(frame.filename == threading.__file__ and frame.name == "_shutdown" for frame in stack):
            return  # All threads are joined, or the program goes on: it was called by another one.
        names = [thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon]
        sys.stderr.write(f"left behind, since they do not end: threads {', '.join(names)}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    timer = threading.Timer(EXIT_SECONDS, leave)
    timer.daemon = True
    timer.start()


def _file_system_message(error: BaseException) -> str | None:
    """Return a message for an error of the file system that the user can act on; None for any other error."""
    if isinstance(error, FileNotFoundError):
        return f"{error.filename or error}: no such file or folder"
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return (
            f"{error.filename or 'the disk'}: {error.strerror}; what was saved before is intact. Free some space: the "
            "same command goes on from the last checkpoint"
        )
    if isinstance(error, OSError) and error.errno in UNUSABLE_PATH and error.filename:
        return f"{error.filename}: {error.strerror}; choose another path, or let this user read and write there"
    return None


def _memory_message(error: BaseException) -> str | None:
    """Return a message where the memory of host or devices is too small; None for any other error."""
    text = str(error)
    if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in text and "Out of memory" not in text:
        return None
    reason = text.partition("\n")[0].rpartition(": ")[2].removesuffix(".")
    return (
        f"memory is too small ({reason or 'MemoryError'}): lower learner.rows, rollout.slots or the lengths in budget, "
        "or take a smaller policy; --dry_run shows what takes how much"
    )


def _print_error(message: str) -> None:
    """Print why the program ends, and turn off logging: at exit Orbax would log tracebacks of unfinished writes."""
    logging.flush()
    python_logging.disable()
    sys.stderr.write(f"error: {inert(hide_credentials(message))}\n")


def parse_flags(
    argv: Sequence[str], arguments: Sequence[str] = (), adapt: Adapt | None = None, show_keys: ShowKeys | None = None
) -> list[str]:
    """Parse all flags; the `flags_parser` of `absl.app.run`. See `override` for the overrides `--config.KEY=VALUE`.

    Args:
      argv: the command, the name of the program first.
      arguments: names of the positional arguments; see `run_main`.
      adapt: see `run_main`.
      show_keys: see `run_main`.

    Raises:
      UserError: an unknown flag or key, a value of the wrong type, a config file that is missing or does not load, a
        positional argument too many or too few.
    """
    argv, given = list(argv), None
    section = next((m[1] or "" for argument in argv[1:] if (m := _KEYS.fullmatch(argument))), None)
    if "config" in flags.FLAGS and any(re.fullmatch(r"--?(help\w*|h|\?)", argument) for argument in argv[1:]):
        sys.stdout.write(HELP)
    elif "config" in flags.FLAGS:
        argv, given = parse_config(argv, adapt)
        if given is None and (not arguments or section is not None):
            raise UserError("no config given; add --config=FILE, e.g. --config=configs/quickstart.py")
        if given is not None and section is not None and show_keys is not None:
            show_keys(given, section)
            sys.exit(0)
    try:
        rest = flags.FLAGS(argv)
    except flags.IllegalFlagValueError as error:
        raise UserError(_first_line(error)) from error
    except flags.Error as error:
        raise UserError(_first_line(error).partition(". ")[0]) from error
    if given is not None:
        flags.FLAGS["config"].value = given.config
    _check_arguments(rest[1:], arguments)
    _show_info_logs()
    for note in given.notes if given is not None else ():
        logging.info("%s", note)
    return rest


def parse_config(argv: Sequence[str], adapt: Adapt | None = None) -> tuple[list[str], Given | None]:
    """Read the config that a command names, with the overrides of the command; see `parse_flags`.

    Returns:
      the other arguments; the config, None if the command names none.

    Raises:
      UserError: see `parse_flags`.
    """
    path = _config_argument(argv)
    if not path:
        if any(_OVERRIDE.match(argument) for argument in argv[1:]):
            raise UserError("no config given; add --config=FILE, e.g. --config=configs/quickstart.py")
        return list(argv), None
    file_config = load_config(path)
    rest, overrides = _split_overrides(argv, file_config)
    overrides = expand_calls(file_config, overrides, path)
    config, notes = (file_config, []) if adapt is None else adapt(file_config, overrides)
    return rest, Given(path, override(config, overrides, path), list(overrides), notes)


def _check_arguments(given: Sequence[str], expected: Sequence[str]) -> None:
    """Raise UserError if there are too many or too few positional arguments; see `run_main`."""
    if len(given) > len(expected) and not (expected and expected[-1].endswith(("...", "...]"))):
        raise UserError(f"unexpected argument {given[len(expected)]!r}; flags are written --name=value")
    if len(given) < len([name for name in expected if not name.startswith("[")]):
        raise UserError(f"{expected[len(given)]} is missing; the command takes {' '.join(expected)}")


def load_config(path: str) -> ml_collections.ConfigDict:
    """Load a config file, `FILE.py` or `FILE.py:argument`, and lock the config.

    Raises:
      UserError: no such file, a key that the base config lacks, a value of another type, any error inside the file.
    """
    file, *argument = path.split(":", 1)
    config = execute_file(file, lambda module: module.get_config(*argument))
    if not isinstance(config, ml_collections.ConfigDict):
        raise UserError(f"{file}: get_config() returned a {type(config).__name__}; return an ml_collections.ConfigDict")
    return config.lock()


def execute_file(file: str, read: Callable[[ModuleType], T]) -> T:
    """Execute a user's Python file and return what `read` makes of its module.

    Raises:
      UserError: no such file, or any error inside the file, with its line.
    """
    if not os.path.isfile(file):
        raise UserError(f"{file}: no such config file{_list_config_files(file)}")
    spec = importlib.util.spec_from_file_location("config_file", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file}: not a Python file; a config file is named *.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return read(module)
    except UserError:
        raise
    except Exception as error:
        raise UserError(_describe_config_error(file, error)) from error


def override(config: ml_collections.ConfigDict, changes: Mapping[str, Any], where: str) -> ml_collections.ConfigDict:
    """Return a copy of a config with changes, parsed as the command line parses them.

    `None` unsets a key that has no value in `configs/base.py`; so does `none` for a number or boolean, while for text
    it is a value like any other. `name(argument=value, ...)` sets `name` and `args` of a section that has both.

    Args:
      config: the config; it is not changed.
      changes: dotted key -> value, as text or as it is; of one key the last counts.
      where: source of the changes, for messages.

    Raises:
      UserError: an unknown key (the nearest is named) or a value of another type.
    """
    config, changes, argv = copy.deepcopy(config), expand_calls(config, changes, where), [""]
    for key, value in changes.items():
        _check_key(where, key, config)
        if str(value).lower() == "none" and _unsets(config, key, str(value), where):
            section, name = _section_of(config, key)
            section[name] = None
        else:
            argv.append(f"--config.{key}={value}")
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
    try:
        values(argv)
    except flags.Error as error:
        raise UserError(_describe_illegal_value(error, where, config)) from error
    changed: ml_collections.ConfigDict = values["config"].value
    return changed


def resolve(config: ml_collections.ConfigDict, *, credentials: bool = False) -> dict[str, Any]:
    """Return the config as plain JSON: nested dicts, lists, strings, finite numbers, booleans and None.

    Args:
      config: the config; it is not changed.
      credentials: keep the credentials in values that are URLs, which no file should have.

    Raises:
      UserError: a value is not JSON; the message names its key.
    """
    plain = {key: _plain(value, key) for key, value in config.to_dict().items()}
    return plain if credentials else hide_credentials_of_urls(plain)


def hide_credentials_of_urls(values: Any, *, variables: bool = False) -> Any:
    """Return plain JSON without the credentials in texts that are URLs; see `hide_credentials`."""
    if isinstance(values, Mapping):
        return {key: hide_credentials_of_urls(value, variables=variables) for key, value in values.items()}
    if isinstance(values, list):
        return [hide_credentials_of_urls(value, variables=variables) for value in values]
    return hide_credentials(values, variables=variables) if is_url(values) else values


def is_url(value: Any) -> bool:
    """Return True for a text that is a URL of HTTP or HTTPS and nothing else."""
    return isinstance(value, str) and bool(re.fullmatch(r"(?i)https?://\S+", value))


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested mapping with their dotted keys; an empty section is a leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, key) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise UserError(
        f"config key {key!r} is {value!r}; use None, strings, finite numbers, booleans, or lists and dicts of them"
    )


def _config_argument(argv: Sequence[str]) -> str:
    """Return the last value of `--config`; empty if there is none."""
    value = ""
    for argument, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if match := _CONFIG.fullmatch(argument):
            value = following if match[1] is None else match[1]
    return value


def _split_overrides(argv: Sequence[str], config: ml_collections.ConfigDict) -> tuple[list[str], dict[str, str]]:
    """Take `--config` and its overrides out of the arguments.

    Returns:
      the other arguments; key -> value of the overrides, of which the last one of a key counts.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    arguments = iter(argv)
    for argument in arguments:
        if match := _CONFIG.fullmatch(argument):
            if match[1] is None:
                next(arguments, "")
        elif match := _OVERRIDE.fullmatch(argument):
            negated, key, value = match.groups()
            overrides.pop(key, None)
            if negated:
                overrides[key] = "False"
            elif value is not None:
                overrides[key] = value
            else:
                is_switch = isinstance(dict(flatten(config.to_dict())).get(key), bool)
                overrides[key] = "True" if is_switch else next(arguments, "")
        else:
            rest.append(argument)
    return rest, overrides


def expand_calls(config: ml_collections.ConfigDict, changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Turn `section = name(argument=value, ...)` into changes of `section.name` and `section.args.argument`.

    Other changes stay as they are. Raises UserError, which begins with `where`, for a text that cannot be read so.
    """
    expanded: dict[str, Any] = {}
    for key, value in changes.items():
        section = config.get(key)
        if not (isinstance(section, ml_collections.ConfigDict) and {"name", "args"} <= {*section}):
            expanded[key] = value
            continue
        with user_error(f"{where}: "):
            call = parse_call(str(value), key)
        if call.values:
            raise UserError(f"{where}: {key}={value}: name each argument, as in {call.name}(argument=value)")
        expanded[f"{key}.name"] = call.name
        for name, argument in call.named.items():
            is_text = name in section.args and section.args.get_type(name) is str
            expanded[f"{key}.args.{name}"] = "none" if argument is None and is_text else argument
    return expanded


def _unsets(config: ml_collections.ConfigDict, key: str, text: str, where: str) -> bool:
    """Return True if `none` or `None` unsets a key; raise UserError for a `None` of text that cannot be unset.

    A key that `configs/base.py` declares as a placeholder may have no value.
    """
    section, name = _section_of(config, key.partition("[")[0])
    optional = isinstance(dict(section.items(preserve_field_references=True)).get(name), ml_collections.FieldReference)
    is_text = section.get_type(name) is str
    if is_text and not optional and text == "None":
        raise UserError(f"{where}: key {key!r} always has a value and cannot be unset")
    return optional and not (is_text and text != "None")


def _section_of(config: ml_collections.ConfigDict, key: str) -> tuple[ml_collections.ConfigDict, str]:
    """Return the section that holds a dotted key, and the key's last part."""
    *sections, name = key.split(".")
    for part in sections:
        config = config[part]
    return config, name


def _check_key(where: str, key: str, config: ml_collections.ConfigDict) -> None:
    """Raise UserError unless `key` is a leaf of the config."""
    known = _leaf_keys(config)
    bare = re.sub(r"\[\d+\]$", "", key)
    if bare in known:
        return
    below = [name for name in known if name.startswith(f"{bare}.")]
    if below:
        raise UserError(f"{where}: {bare!r} is a section; set its keys one by one: {', '.join(below)}")
    raise UserError(_describe_unknown_key(where, key, known))


def _describe_unknown_key(where: str, key: str, known: Sequence[str]) -> str:
    """Return the message for an unknown key.

    It names the counterpart of another trainer's key, the nearest dotted key, or one with the same last part.
    """
    section, last = key.partition(".")[0], key.rpartition(".")[2]
    same = [name for name in known if name.rpartition(".")[2] == last]
    near = difflib.get_close_matches(key, known, 1, 0.85)
    near = near or [name for name in same if name.partition(".")[0] == section]
    near = near or [name for name in known if name == SYNONYMS.get(last.lower())]
    near = near or difflib.get_close_matches(key, known, 1, 0.75)
    if not near and last.lower() in NO_COUNTERPART:
        return f"{where}: unknown key {key!r}; {NO_COUNTERPART[last.lower()]}"
    near = near or same or difflib.get_close_matches(key, known, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else "configs/base.py lists the keys"
    return f"{where}: unknown key {key!r}; {hint}"


def _describe_illegal_value(error: flags.Error, path: str, config: ml_collections.ConfigDict) -> str:
    """Return the message for an override whose value has another type than the key in the config file."""
    match = re.match(r"flag --config\.([^=]+)=(.*?): ", str(error), re.DOTALL)
    if not match:
        return f"{path}: {_first_line(error)}"
    return f"{path}: key {match[1]!r} takes {_type_name(*_section_of(config, match[1]))}, not {match[2]!r}"


def _describe_config_error(file: str, error: Exception) -> str:
    """Return one line for an exception raised while `file` was executed, with the innermost line of the user's code.

    ConfigDict's errors name only the last part of a key. Its section, and the config around that, are local variables
    in the frames of the traceback.
    """
    where, configs, section = file, [], None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        configs += [value for value in frame.f_locals.values() if isinstance(value, ml_collections.ConfigDict)]
        if name.startswith(os.path.dirname(ml_collections.__file__)):
            section = frame.f_locals.get("self")
        elif name != __file__ and not name.startswith("<"):
            where = f"{os.path.relpath(name)}, line {line}"
    message = str(error.args[0]) if error.args else ""
    unknown = isinstance(error, KeyError | AttributeError) and re.match(r"\W*(?:Key \W)?(\w+)", message)
    mistyped = isinstance(error, TypeError) and re.match(r"Could not override field '(\w+)'", message)
    if isinstance(section, ml_collections.ConfigDict) and (unknown or mistyped):
        root = max(configs, key=lambda config: len(_leaf_keys(config)))
        prefix = _prefix_of(section, root)
        if unknown:
            return _describe_unknown_key(where, prefix + unknown[1], _leaf_keys(root))
        if mistyped:
            return f"{where}: key '{prefix}{mistyped[1]}' takes {_type_name(section, mistyped[1])}, not another type"
    return f"{where}: {type(error).__name__}: {_first_line(error)}"


def _prefix_of(section: ml_collections.ConfigDict, root: ml_collections.ConfigDict) -> str:
    """Return the dotted name of a section of `root` with a trailing dot; empty if it is the root or not in it."""
    for name, value in root.items():
        if value is section:
            return f"{name}."
        if isinstance(value, ml_collections.ConfigDict) and (below := _prefix_of(section, value)):
            return f"{name}.{below}"
    return ""


def _leaf_keys(config: ml_collections.ConfigDict) -> list[str]:
    return [key for key, _ in flatten(config.to_dict())]


def _type_name(section: ml_collections.ConfigDict, name: str) -> str:
    kind = section.get_type(name).__name__
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _list_config_files(file: str) -> str:
    """Return a phrase that lists the config files in the folder of a missing one."""
    folder = os.path.dirname(file) or "."
    if not os.path.isdir(folder):
        return f"; there is no folder {folder!r} here"
    names = sorted(name for name in os.listdir(folder) if name.endswith(".py") and name != "__init__.py")
    return f"; {folder} has {', '.join(names)}" if names else f"; {folder} has no config files"


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    text = str(error.args[0]) if error.args else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]


def _show_info_logs() -> None:
    """Show INFO lines of this project, and not those of the libraries that share absl's logger."""
    if flags.FLAGS["verbosity"].present:
        return
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(_is_ours_or_warning)


def _is_ours_or_warning(record: Any) -> bool:
    _, installed, tail = record.pathname.rpartition("site-packages")
    return record.levelname != "INFO" or not installed or tail.startswith(f"{os.sep}agentr1_jax")

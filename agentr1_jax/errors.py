"""Errors that end a program with a message and no traceback."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Values of `OSError.errno` for a full disk or an exhausted quota."""
GET_DATA = (
    "`python -m experiments.prepare_data FOLDER` downloads the data, AGENTR1_DATA=FOLDER (or "
    "--config.task.data_dir=FOLDER) names them; see docs/data.md"
)
"""What to do where real data are missing, for messages."""


class UserError(Exception):
    """Mistake of the user. Its message says what is wrong, where, and what to do; no traceback is shown."""

    status = 2
    """Exit status of the program: the same command would fail again."""


class RetryableError(UserError):
    """Failure that another attempt may not meet, such as a lost connection: launchers start the program again."""

    status = 1


@contextlib.contextmanager
def user_error(prefix: str = "") -> Iterator[None]:
    """Turn a ValueError or FileNotFoundError of the block into a UserError whose message begins with `prefix`."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{prefix}{error}") from error

"""Errors that end a program with a message and no traceback; texts that are safe to print."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Values of `OSError.errno` for a full disk or an exhausted quota."""
GET_DATA = (
    "`python -m experiments.prepare_data FOLDER` downloads the data, AGENTR1_DATA=FOLDER (or "
    "--config.task.data_dir=FOLDER) names them; see docs/data.md"
)
"""What to do where real data are missing, for messages."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def inert(text: str) -> str:
    """Return a text without what a terminal would obey: escapes, other control characters, changes of direction."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


HIDDEN = "***"
"""Stands in place of credentials."""
VARIABLE = r"\$(?:\w+|\{\w+\})"
"""An environment variable in a URL, which stands for a credential: `$NAME` or `${NAME}`."""
_IN_AUTHORITY = re.compile(rf"(?<=://)(?!(?:[^\s/?#@:]*:)?{VARIABLE}@)[^\s/?#]*(?=@)")
_IN_QUERY = re.compile(
    r"([?&](?:[\w.-]{0,64}[_.-])?(?:\w{0,64}token|(?:api|access)?key|secret|passw(?:or)?d|pwd|auth|sig|signature|credentials?)=)"
    rf"(?!{VARIABLE}(?:[&#\s'\":,;)]|$))[^&#\s'\"]+",
    re.IGNORECASE,
)


def hide_credentials(text: str, *, variables: bool = False) -> str:
    """Return a text without the credentials in its URLs: `user:password@`, and `token=...`, `api_key=...` and the like.

    Args:
      text: a URL, or a message with URLs.
      variables: hide the names of environment variables that stand for credentials (`$NAME`), too.
    """
    if variables:
        text = re.sub(VARIABLE, HIDDEN, text)
    return _IN_QUERY.sub(rf"\1{HIDDEN}", _IN_AUTHORITY.sub(HIDDEN, text))


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

"""Errors that end a program with a message and no traceback."""

from __future__ import annotations

import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""`OSError.errno` where there is no room left to write to."""


class UserError(Exception):
    """A mistake of the user: its message says what is wrong, where, and what to do; no traceback is shown."""

    status = 2
    """Exit status of the program: starting it again as it is would end the same way."""


class PassingError(UserError):
    """What may go well at another try, without any change: launchers start the program again."""

    status = 1

"""The one error class for mistakes that the user can repair."""

from __future__ import annotations


class UserError(Exception):
    """A mistake of the user: its message says what is wrong, where, and what to do; no traceback is shown."""

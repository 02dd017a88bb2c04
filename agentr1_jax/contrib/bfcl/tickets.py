"""Function set `TicketAPI`: a queue of support tickets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from agentr1_jax.contrib.bfcl.base import (
    COUNT,
    INTEGER,
    OPTIONAL_TEXT,
    TEXT,
    CallFailed,
    array,
    check,
    free_number,
    record,
)

PRIORITIES = range(1, 6)

_TICKET = record(
    ["id"],
    id=INTEGER,
    title=TEXT,
    description=TEXT,
    status=TEXT,
    priority={"type": ["integer", "string"]},
    created_by=TEXT,
    resolution=TEXT,
)
CONFIG = record(ticket_queue=array(_TICKET), ticket_counter=COUNT, current_user=OPTIONAL_TEXT)


@dataclasses.dataclass
class Tickets:
    """The queue, and the name of the user who is logged in."""

    queue: list[dict[str, Any]]
    """tickets, oldest first; those of the config may lack fields other than `id`"""
    ticket_counter: int
    """least id of a new ticket"""
    current_user: str | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        check(config, CONFIG, "TicketAPI")
        queue = list(config.get("ticket_queue", ()))
        ids = [ticket["id"] for ticket in queue]
        if len(set(ids)) < len(ids):
            raise ValueError(f"TicketAPI.ticket_queue: an id occurs twice among {ids}")
        return cls(queue, config.get("ticket_counter", 1), config.get("current_user"))

    def ticket_login(self, username: str, password: str) -> dict[str, Any]:
        # The data have no accounts: any name and password are accepted.
        if not username or not password:
            return {"success": False}
        self.current_user = username
        return {"success": True}

    def ticket_get_login_status(self) -> dict[str, Any]:
        return {"login_status": self.current_user is not None}

    def logout(self) -> dict[str, Any]:
        success, self.current_user = self.current_user is not None, None
        return {"success": success}

    def create_ticket(self, title: str, description: str = "", priority: int = 1) -> dict[str, Any]:
        self._check_login()
        _check_priority(priority)
        number = free_number(self.ticket_counter, [ticket["id"] for ticket in self.queue])
        ticket = {"id": number, "title": title, "description": description, "status": "Open", "priority": priority}
        self.queue.append({**ticket, "created_by": self.current_user})
        return ticket

    def get_ticket(self, ticket_id: int) -> dict[str, Any]:
        for ticket in self.queue:
            if ticket["id"] == ticket_id:
                return ticket
        raise CallFailed("no_such_ticket", f"there is no ticket {ticket_id}")

    def get_user_tickets(self, status: str | None = None) -> list[dict[str, Any]]:
        self._check_login()
        own = [ticket for ticket in self.queue if ticket.get("created_by") == self.current_user]
        if status is None:
            return own
        return [ticket for ticket in own if ticket.get("status", "").lower() == status.lower()]

    def edit_ticket(self, ticket_id: int, updates: dict[str, Any]) -> dict[str, Any]:
        ticket = self.get_ticket(ticket_id)
        if "priority" in updates:
            _check_priority(updates["priority"])
        ticket.update(updates)
        return {"status": f"Ticket {ticket_id} is changed."}

    def resolve_ticket(self, ticket_id: int, resolution: str) -> dict[str, Any]:
        self._set_status(ticket_id, "Resolved")["resolution"] = resolution
        return {"status": f"Ticket {ticket_id} is resolved."}

    def close_ticket(self, ticket_id: int) -> dict[str, Any]:
        self._set_status(ticket_id, "Closed")
        return {"status": f"Ticket {ticket_id} is closed."}

    def _set_status(self, ticket_id: int, status: str) -> dict[str, Any]:
        """Change the status of a ticket and return the ticket."""
        ticket = self.get_ticket(ticket_id)
        if ticket.get("status") == status:
            raise CallFailed("no_change", f"ticket {ticket_id} is {status.lower()} already")
        ticket["status"] = status
        return ticket

    def _check_login(self) -> None:
        if self.current_user is None:
            raise CallFailed("not_logged_in", "nobody is logged in; use ticket_login")


def _check_priority(priority: int) -> None:
    if priority not in PRIORITIES:
        raise CallFailed("bad_value", f"priority is {priority}; it must be {PRIORITIES[0]} to {PRIORITIES[-1]}")

"""Function set `MessageAPI`: the users of a workspace and the messages sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from agentr1_jax.contrib.bfcl.base import (
    COUNT,
    OPTIONAL_TEXT,
    TEXT,
    CallFailed,
    array,
    check,
    free_number,
    mapping,
    record,
)

USERS = {"Alice": "USR001", "Bob": "USR002", "Catherine": "USR003", "Daniel": "USR004"}
"""Default users; the ground truth refers to them by id."""

CONFIG = record(
    user_map=mapping(TEXT),
    user_count=COUNT,
    inbox=array(mapping({"type": ["string", "array"], "items": TEXT})),
    message_count=COUNT,
    current_user=OPTIONAL_TEXT,
)


@dataclasses.dataclass
class Messages:
    """Users and messages. The data have no senders: the user who is logged in counts as the sender of all messages."""

    users: dict[str, str]
    """name -> id"""
    user_count: int
    """the id of a new user is larger than this number"""
    inbox: list[dict[str, str]]
    """`{"receiver_id", "message"}` each, oldest first"""
    message_count: int
    """number of messages ever sent, deleted ones included; the id of the latest one"""
    current_user: str | None
    """id of the user who is logged in"""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        check(config, CONFIG, "MessageAPI")
        users = dict(config.get("user_map", USERS))
        sent = [pair for entry in config.get("inbox", ()) for pair in entry.items()]
        inbox = [
            {"receiver_id": receiver, "message": text}
            for receiver, texts in sent
            for text in ([texts] if isinstance(texts, str) else texts)
        ]
        user = config.get("current_user")
        if user is not None and user not in users.values():
            raise ValueError(f"MessageAPI.current_user: {user!r} is no user; there are {', '.join(users.values())}")
        counts = config.get("user_count", len(users)), config.get("message_count", len(inbox))
        return cls(users, counts[0], inbox, counts[1], user)

    def list_users(self) -> dict[str, Any]:
        return {"user_list": list(self.users)}

    def get_user_id(self, user: str) -> dict[str, Any]:
        if user not in self.users:
            raise CallFailed("no_such_user", f"there is no user {user!r}")
        return {"user_id": self.users[user]}

    def message_login(self, user_id: str) -> dict[str, Any]:
        if user_id not in self.users.values():
            return {"login_status": False, "message": f"There is no user {user_id}."}
        self.current_user = user_id
        return {"login_status": True, "message": f"{user_id} is logged in."}

    def message_get_login_status(self) -> dict[str, Any]:
        return {"login_status": self.current_user is not None}

    def add_contact(self, user_name: str) -> dict[str, Any]:
        if user_name in self.users:
            known = self.users[user_name]
            return {"added_status": False, "user_id": known, "message": f"{user_name} is a contact already."}
        taken = [int(i.removeprefix("USR")) for i in self.users.values() if i.removeprefix("USR").isdecimal()]
        self.users[user_name] = f"USR{free_number(self.user_count + 1, taken):03d}"
        return {"added_status": True, "user_id": self.users[user_name], "message": f"{user_name} is now a contact."}

    def send_message(self, receiver_id: str, message: str) -> dict[str, Any]:
        self._check_login()
        if receiver_id not in self.users.values():
            raise CallFailed("no_such_user", f"there is no user {receiver_id!r}")
        self.message_count += 1
        self.inbox.append({"receiver_id": receiver_id, "message": message})
        text = f"The message to {receiver_id} is sent."
        return {"sent_status": True, "message_id": self.message_count, "message": text}

    def delete_message(self, receiver_id: str) -> dict[str, Any]:
        self._check_login()
        sent = [i for i, message in enumerate(self.inbox) if message["receiver_id"] == receiver_id]
        if sent:
            del self.inbox[sent[-1]]
        text = f"The latest message to {receiver_id} is deleted." if sent else f"There is no message to {receiver_id}."
        return {"deleted_status": bool(sent), "receiver_id": receiver_id, "message": text}

    def view_messages_sent(self) -> dict[str, Any]:
        self._check_login()
        messages: dict[str, list[str]] = {}
        for message in self.inbox:
            messages.setdefault(message["receiver_id"], []).append(message["message"])
        return {"messages": messages}

    def search_messages(self, keyword: str) -> dict[str, Any]:
        self._check_login()
        return {"results": [message for message in self.inbox if keyword.lower() in message["message"].lower()]}

    def get_message_stats(self) -> dict[str, Any]:
        self._check_login()
        receivers = [message["receiver_id"] for message in self.inbox]
        contacts = len(set(receivers) - {self.current_user})
        return {"stats": {"received_count": receivers.count(str(self.current_user)), "total_contacts": contacts}}

    def _check_login(self) -> None:
        if self.current_user is None:
            raise CallFailed("not_logged_in", "nobody is logged in; use message_login")

"""Function set `TwitterAPI`: one user's account, and the posts of all users."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from agentr1_jax.contrib.bfcl.base import COUNT, INTEGER, TEXT, CallFailed, array, check, free_number, mapping, record

_POST = record(
    ["id", "username", "content", "tags", "mentions"],
    id=INTEGER,
    username=TEXT,
    content=TEXT,
    tags=array(TEXT),
    mentions=array(TEXT),
)
_COMMENT = {**record(["username"], username=TEXT, content=TEXT, comment=TEXT), "minProperties": 2, "maxProperties": 2}
CONFIG = record(
    username=TEXT,
    password=TEXT,
    authenticated={"type": "boolean"},
    tweets=mapping(_POST, "^[0-9]+$"),
    comments=mapping(array(_COMMENT), "^[0-9]+$"),
    retweets=mapping(array(INTEGER)),
    following_list=array(TEXT),
    tweet_counter=COUNT,
)


@dataclasses.dataclass
class Posting:
    """The account and the posts. An account without username cannot log in."""

    username: str
    password: str
    authenticated: bool
    tweets: dict[str, dict[str, Any]]
    """id, as a string, -> tweet"""
    comments: dict[str, list[dict[str, str]]]
    """id of a tweet -> its comments, `{"username", "content"}` each"""
    retweets: dict[str, list[int]]
    """user -> ids of the tweets that the user retweeted"""
    following: list[str]
    tweet_counter: int
    """least id of a new tweet"""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        check(config, CONFIG, "TwitterAPI")
        tweets = dict(config.get("tweets", {}))
        for key, tweet in tweets.items():
            if key != str(tweet["id"]):
                raise ValueError(f"TwitterAPI.tweets: the tweet {key!r} has the id {tweet['id']}")
        return cls(
            username=config.get("username", ""),
            password=config.get("password", ""),
            authenticated=config.get("authenticated", False),
            tweets=tweets,
            comments={
                key: [{"username": c["username"], "content": c.get("content", c.get("comment"))} for c in comments]
                for key, comments in config.get("comments", {}).items()
            },
            retweets=dict(config.get("retweets", {})),
            following=list(config.get("following_list", ())),
            tweet_counter=config.get("tweet_counter", 0),
        )

    def authenticate_twitter(self, username: str, password: str) -> dict[str, Any]:
        known = bool(username) and (username, password) == (self.username, self.password)
        self.authenticated = self.authenticated or known
        return {"authentication_status": known}

    def posting_get_login_status(self) -> dict[str, Any]:
        return {"login_status": self.authenticated}

    def post_tweet(
        self, content: str, tags: list[str] | None = None, mentions: list[str] | None = None
    ) -> dict[str, Any]:
        self._check_login()
        number = free_number(self.tweet_counter, [tweet["id"] for tweet in self.tweets.values()])
        tweet: dict[str, Any] = {"id": number, "username": self.username, "content": content}
        tweet |= {"tags": tags or [], "mentions": mentions or []}
        self.tweets[str(number)] = tweet
        return tweet

    def comment(self, tweet_id: int, comment_content: str) -> dict[str, Any]:
        self._check_login()
        self.get_tweet(tweet_id)
        comment = {"username": self.username, "content": comment_content}
        self.comments.setdefault(str(tweet_id), []).append(comment)
        return {"comment_status": f"The comment on tweet {tweet_id} is posted."}

    def retweet(self, tweet_id: int) -> dict[str, Any]:
        self._check_login()
        self.get_tweet(tweet_id)
        retweets = self.retweets.setdefault(self.username, [])
        if tweet_id in retweets:
            return {"retweet_status": f"Tweet {tweet_id} was retweeted before."}
        retweets.append(tweet_id)
        return {"retweet_status": f"Tweet {tweet_id} is retweeted."}

    def mention(self, tweet_id: int, mentioned_usernames: list[str]) -> dict[str, Any]:
        self.get_tweet(tweet_id)["mentions"].extend(mentioned_usernames)
        return {"mention_status": f"Tweet {tweet_id} mentions them."}

    def follow_user(self, username_to_follow: str) -> dict[str, Any]:
        self._check_login()
        if username_to_follow in self.following:
            return {"follow_status": False}
        self.following.append(username_to_follow)
        return {"follow_status": True}

    def unfollow_user(self, username_to_unfollow: str) -> dict[str, Any]:
        self._check_login()
        if username_to_unfollow not in self.following:
            return {"unfollow_status": False}
        self.following.remove(username_to_unfollow)
        return {"unfollow_status": True}

    def list_all_following(self) -> dict[str, Any]:
        self._check_login()
        return {"following_list": self.following}

    def get_tweet(self, tweet_id: int) -> dict[str, Any]:
        if str(tweet_id) not in self.tweets:
            raise CallFailed("no_such_tweet", f"there is no tweet {tweet_id}")
        return self.tweets[str(tweet_id)]

    def get_user_tweets(self, username: str) -> dict[str, Any]:
        return {"user_tweets": [tweet for tweet in self.tweets.values() if tweet["username"] == username]}

    def search_tweets(self, keyword: str) -> dict[str, Any]:
        return {"matching_tweets": [t for t in self.tweets.values() if keyword.lower() in t["content"].lower()]}

    def get_tweet_comments(self, tweet_id: int) -> dict[str, Any]:
        self.get_tweet(tweet_id)
        return {"comments": self.comments.get(str(tweet_id), [])}

    def get_user_stats(self, username: str) -> dict[str, Any]:
        return {
            "tweet_count": len(self.get_user_tweets(username)["user_tweets"]),
            "following_count": len(self.following) if username == self.username else 0,
            "retweet_count": len(self.retweets.get(username, [])),
        }

    def _check_login(self) -> None:
        if not self.authenticated:
            raise CallFailed("not_logged_in", "nobody is logged in; use authenticate_twitter")

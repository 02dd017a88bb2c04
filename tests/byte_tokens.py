"""A tokenizer whose ids are bytes, a small search, and an agent with both."""

from __future__ import annotations

from agentr1_jax.agents.context import context_rule
from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.tasks import qa
from agentr1_jax.text.chat import chat_format
from agentr1_jax.text.tokenizer import encode_parts, split_at_tokens
from agentr1_jax.tools.base import failure
from agentr1_jax.tools.search import BM25, Passage, SearchTool
from agentr1_jax.trajectory import Budget

TITLES = ["Glass Harbor", "Pale River", "Ada Corvin", "Milo Trent", "Port Vale", "Gray Tower"]
PASSAGES = [Passage(f"p{i}", title, f"About {title.lower()}.") for i, title in enumerate(TITLES)]
SEARCH = SearchTool(BM25(PASSAGES), top_k=2)


class Bytes:
    """A tokenizer whose ids are bytes, so that any text comes back as it was."""

    name = "bytes"
    added = {"<|im_start|>": 0, "<|im_end|>": 1}
    stop_id, stop_ids, pad_id, vocab_size = 1, (1,), 2, 259

    def encode_data(self, text):
        return [3 + byte for byte in text.encode()]

    def encode_template(self, text):
        return encode_parts(self, split_at_tokens(text, self.added))

    def decode(self, ids):
        return bytes(int(i) - 3 for i in ids if i > 2).decode(errors="replace")

    def render_chat(self, messages, tools=()):
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        offered = " ".join(tool["function"]["name"] for tool in tools)
        return f"{offered}{turns}<|im_start|>assistant\n"


class Broken:
    """A search that the infrastructure fails."""

    name, description, parameters = "search", "", SEARCH.parameters

    def execute(self, arguments):
        return failure("down", "Error: down.", "infrastructure")


TOKENIZER = Bytes()
BUDGET = Budget(max_steps=3, response_tokens=120, observation_tokens=200, context_tokens=900, trajectory_tokens=2000)


def agent(tool=SEARCH, budget=BUDGET):
    def env():
        return qa.search_env([tool], {"answer": 1.0}, "Search.")

    return EnvLoop(env, TOKENIZER, chat_format(TOKENIZER), context_rule("append"), budget)

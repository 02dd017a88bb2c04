"""Writes tests/golden_chat.json: ids that `transformers.apply_chat_template` gives for one conversation with tools.

python tests/make_golden_chat.py DATA      (the folder of shared data)

opening      system and question, with the tool's schema
kept         up to the second tool result: no template has reason yet to strip thinking
rerendered   with the answer and a further question: Qwen3's template strips all earlier thinking
several      one step that called twice: both results, one after the other
"""

from __future__ import annotations

import json
import pathlib
import sys

import transformers

FILE = pathlib.Path(__file__).with_name("golden_chat.json")
# minimind's template opens the thinking itself.
TEMPLATE_ARGS = {"qwen2.5": {}, "qwen3": {}, "minimind-6400": {"open_thinking": True}}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches passages.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
OPENING = [
    {"role": "system", "content": "You answer questions."},
    {"role": "user", "content": "Where was the director of “Kabalci” born? 北京 or Ostra?"},
]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "%s"}}\n</tool_call>'
TURNS = [
    ("The film first.", CALL % "Kabalci", "tool", "- Kabalci: A film of 1962, by Corvin Hale."),
    ("Now him.", CALL % "Corvin Hale", "tool", "- Corvin Hale: Born in Ostra.\n- Ostra: A city."),
    ("Both are known.", "<answer> Ostra </answer>", "user", "And when was the film made?"),
]
"""Thinking, what follows it, role and content of the turn that comes back."""
SEVERAL = ["- Kabalci: A film of 1962.", "- Ostra: A city.\n- Ostra (river): 1,962 km.", "No results"]
"""What comes back of three calls of the first turn."""


def response(name: str, thinking: str, said: str) -> str:
    """What the policy samples in one turn, without the stop token."""
    opened = "" if TEMPLATE_ARGS[name] else "<think>\n"
    return f"{opened}{thinking}\n</think>\n\n{said}"


def golden(data_dir: pathlib.Path) -> dict[str, dict[str, list[int]]]:
    """The ids of each tokenizer."""
    out = {}
    for name, args in TEMPLATE_ARGS.items():
        tokenizer = transformers.AutoTokenizer.from_pretrained(data_dir / "tokenizers" / name)
        turns = [
            turn
            for thinking, said, role, content in TURNS
            for turn in (
                {"role": "assistant", "content": response(name, thinking, said)},
                {"role": role, "content": content},
            )
        ]
        results = [{"role": "tool", "content": content} for content in SEVERAL]
        parts = {"opening": OPENING, "kept": OPENING + turns[:4], "rerendered": OPENING + turns}
        parts["several"] = [*OPENING, turns[0], *results]
        out[name] = {
            part: tokenizer.apply_chat_template(
                messages, tools=[SEARCH], add_generation_prompt=True, tokenize=True, return_dict=False, **args
            )
            for part, messages in parts.items()
        }
    return out


if __name__ == "__main__":
    FILE.write_text(json.dumps(golden(pathlib.Path(sys.argv[1])), separators=(",", ":")) + "\n")

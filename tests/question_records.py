"""Made-up questions in the formats of HotpotQA, 2WikiMultihopQA and MuSiQue, as their authors publish them."""

from __future__ import annotations

PARAGRAPHS = [
    ["Jaws", ["Jaws is a film. ", " Steven directed it."]],
    ["Steven", ["He was born in Ohio."]],
    ["Rex", ["A dog."]],
]


def hotpot(i=0, **changes):
    record = {
        "_id": f"h{i}",
        "question": f"Where was the director of Jaws {i} born?",
        "answer": "Ohio",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [["Steven", 0], ["Jaws", 1], ["Steven", 1]],
        "context": PARAGRAPHS,
    }
    return {**record, **changes}


def wiki(i=0, **changes):
    return hotpot(i, _id=f"w{i}", type="compositional", evidences=[["Jaws", "director", "Steven"]], **changes)


def musique(i=0, **changes):
    texts = {"Jaws": "Jaws is a film.", "Steven": "He was born in Ohio.", "Rex": "A dog."}
    record = {
        "id": f"2hop__{i}_1",
        "question": f"Where was the director of Jaws {i} born?",
        "answer": "Ohio",
        "answer_aliases": ["State of Ohio", ""],
        "answerable": True,
        "question_decomposition": [
            {"question": "Who directed Jaws?", "answer": "Steven", "paragraph_support_idx": 2},
            {"question": "Where was #1 born?", "answer": "Ohio", "paragraph_support_idx": 0},
        ],
        "paragraphs": [
            {"idx": n, "title": title, "paragraph_text": texts[title], "is_supporting": title != "Rex"}
            for n, title in enumerate(["Steven", "Rex", "Jaws"])
        ],
    }
    return {**record, **changes}

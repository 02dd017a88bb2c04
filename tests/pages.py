"""What the inspector's page holds, unpacked as its script does it."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any


def island(page: str) -> dict[str, Any]:
    """Tables, notes and the facts of all trajectories."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def unpack(page: str) -> dict[str, dict[str, Any]]:
    """Facts, tokens and texts of each trajectory that the page shows, by uid."""
    packed = dict(re.findall(r'<script type="application/gzip" id="t(\d+)">(.*?)</script>', page))
    shown = [facts for facts in island(page)["trajectories"] if facts["blob"] is not None]
    assert sorted(str(facts["blob"]) for facts in shown) == sorted(packed)
    return {
        facts["uid"]: {
            **facts,
            **(data := json.loads(gzip.decompress(base64.b64decode(packed[str(facts["blob"])], validate=True)))),
            "steps": [{**one, **other} for one, other in zip(facts["steps"], data["steps"], strict=True)],
        }
        for facts in shown
    }

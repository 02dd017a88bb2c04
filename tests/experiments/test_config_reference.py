"""docs/config.md is what its generator writes, and says something about every key."""

from __future__ import annotations

from configs import base
from experiments import config_reference


def test_page_is_current() -> None:
    page = config_reference.PAGE.read_text(encoding="utf-8")
    assert page == config_reference.render_page(), "run python -m experiments.config_reference"


def test_every_key_has_type_and_meaning() -> None:
    page = config_reference.render_page()
    assert "|  |" not in page and "<class" not in page and "typing." not in page
    keys = base.get_config().to_dict()
    for section, values in keys.items():
        for name in values if isinstance(values, dict) else ():
            assert f"| `{section}.{name}" in page, f"{section}.{name}"

"""Self-contained HTML pages, rendered from the templates in `pages/`.

Templates escape whatever they are given. Text of models, tools and data sets reaches a page in two ways only: escaped,
or as JSON without `<`, `>` and `&`, which a script turns into text nodes. The content security policy of the pages
admits no request, and no script but their own, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from agentr1_jax import files
from agentr1_jax.report.tables import format_value


def write_page(path: str | os.PathLike[str], template: str, **values: Any) -> None:
    """Render a template of `pages/` to a file, which appears whole; it is written piece by piece."""
    pieces = _environment().get_template(template).generate(values)
    with files.atomic_write(path, errors="replace", newline="\n") as out:
        out.writelines(pieces)
        out.write("\n")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.PackageLoader("agentr1_jax.report", "pages"),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(source=_source, hash=_hash)
    environment.filters.update(show=_show, breakable=_breakable, data_url=_data_url)
    return environment


def _source(name: str) -> Markup:
    """Return the style sheet or script `name` as it is."""
    return Markup(resources.files("agentr1_jax.report").joinpath("pages", name).read_text("utf-8"))


def _hash(name: str) -> str:
    """Return the hash of a script for the content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(_source(name).encode()).digest()).decode()}"


def _show(value: Any) -> str:
    """Return a value as people read it; a dash for None and NaN."""
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    return "–" if missing else format_value(value)


def _breakable(name: str) -> Markup:
    """Return a name that may break after `_` and `.`."""
    return Markup("<wbr>").join(re.split(r"(?<=[_.])", name))


def _data_url(png: str | os.PathLike[str]) -> str:
    """Return the URL of a picture that is inlined."""
    return f"data:image/png;base64,{base64.b64encode(files.read_bytes(png)).decode()}"

"""Fill in launch/gke/jobset.yaml from a file of values: `python3 launch/gke/render.py FILE -- ARGUMENTS...`.

Standard library only. Prints the manifest. A mistake ends with a message and status 2.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import string
import sys
from collections.abc import Sequence

TEMPLATE = pathlib.Path(__file__).with_name("jobset.yaml")
LEAST = {"hosts": 1, "chips_per_host": 1, "restarts": 0, "save_seconds": 0, "port": 1}
PATTERNS = {
    "name": "[a-z]([a-z0-9-]{0,38}[a-z0-9])?",
    "namespace": "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
    "image": "[A-Za-z0-9][A-Za-z0-9._/:@-]*",
    "service_account": "[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
    "claim": "[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
    "data": r"/[A-Za-z0-9_./-]*",
    "accelerator": "tpu[a-z0-9-]*",
    "topology": r"[1-9][0-9]*(x[1-9][0-9]*){1,2}",
} | dict.fromkeys(LEAST, "0|[1-9][0-9]{0,8}")


class Mistake(Exception):
    """A mistake of the user; only its message is shown."""


def read_values(path: pathlib.Path) -> dict[str, str]:
    """Return the lines `key=value` of a file; blank lines and lines that begin with # are skipped.

    Raises:
      Mistake: the file cannot be read, a line is malformed, or a key occurs twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Mistake(f"cannot read the values: {error}") from None
    values: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals:
            raise Mistake(f"{path}:{number}: '{line}' is not key=value")
        if key in values:
            raise Mistake(f"{path}:{number}: a second '{key}'")
        values[key] = value
    return values


def check(values: dict[str, str], path: pathlib.Path) -> None:
    """Raise Mistake where a value is missing, unknown or impossible."""
    for word, keys in (("misses", PATTERNS.keys() - values.keys()), ("has unknown", values.keys() - PATTERNS.keys())):
        if keys:
            raise Mistake(f"{path} {word} {', '.join(sorted(keys))}; launch/gke/values.env lists them all")
    for key, pattern in PATTERNS.items():
        if not re.fullmatch(pattern, values[key]):
            raise Mistake(f"{path}: {key}={values[key]} must match {pattern}")
        if key in LEAST and int(values[key]) < LEAST[key]:
            raise Mistake(f"{path}: {key}={values[key]} must be at least {LEAST[key]}")
    chips = math.prod(map(int, values["topology"].split("x")))
    hosts, each = int(values["hosts"]), int(values["chips_per_host"])
    if hosts * each != chips:
        raise Mistake(
            f"{path}: topology={values['topology']} has {chips} chips, but hosts={hosts} with "
            f"chips_per_host={each} have {hosts * each}"
        )


def render(template: str, values: dict[str, str], arguments: Sequence[str]) -> str:
    """Return the manifest. `arguments` reach the process unchanged: their `$(NAME)` is escaped for Kubernetes."""
    escaped = json.dumps([argument.replace("$", "$$") for argument in arguments])
    return string.Template(template).substitute(values, arguments=escaped)


def main(argv: Sequence[str]) -> int:
    """Print the manifest for `FILE -- ARGUMENTS...` and return the exit status."""
    path = pathlib.Path(argv[0])
    try:
        values = read_values(path)
        check(values, path)
    except Mistake as mistake:
        sys.stderr.write(f"error: {mistake}\n")
        return 2
    sys.stdout.write(render(TEMPLATE.read_text(encoding="utf-8"), values, argv[2:]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

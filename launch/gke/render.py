"""Fill in launch/gke/jobset.yaml: `python3 launch/gke/render.py FILE KEY=VALUE ... -- ARGUMENTS...`.

FILE holds values of the cluster, the words before `--` those of the run; `env=NAME=VALUE` may be repeated.
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
QUANTITY = "[1-9][0-9]*(m|Ki|Mi|Gi|Ti)?"
OF_RUN = {"restarts": 0, "save_seconds": 0, "slices": 1, "spot": 0, "secrets": 0}
LEAST = {"hosts": 1, "chips_per_host": 1, "port": 1, **OF_RUN}
PATTERNS = {
    "name": "[a-z]([a-z0-9-]{0,38}[a-z0-9])?",
    "namespace": "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
    "image": "[A-Za-z0-9][A-Za-z0-9._/:@-]*",
    "service_account": "[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
    "claim": "[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
    "queue": "([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?",
    **dict.fromkeys(("cpu", "memory", "memory_limit", "shm"), QUANTITY),
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
    """Raise Mistake where a value of the file or of the run is missing, unknown or impossible."""
    for word, keys in (("misses", PATTERNS.keys() - values.keys()), ("has unknown", values.keys() - PATTERNS.keys())):
        if keys:
            raise Mistake(f"{path} {word} {', '.join(sorted(keys))}; launch/gke/values.env lists them all")
    for key, pattern in PATTERNS.items():
        where = f"--{key}={values[key]}" if key in OF_RUN or key == "name" else f"{path}: {key}={values[key]}"
        if not re.fullmatch(pattern, values[key]):
            raise Mistake(f"{where} must match {pattern}")
        if key in LEAST and int(values[key]) < LEAST[key]:
            raise Mistake(f"{where} must be at least {LEAST[key]}")
    chips = math.prod(map(int, values["topology"].split("x")))
    hosts, each = int(values["hosts"]), int(values["chips_per_host"])
    if hosts * each != chips:
        raise Mistake(
            f"{path}: topology={values['topology']} has {chips} chips, but hosts={hosts} with "
            f"chips_per_host={each} have {hosts * each}"
        )


def render(template: str, values: dict[str, str], env: dict[str, str], arguments: Sequence[str]) -> str:
    """Return the manifest. `env` and `arguments` reach the process unchanged: their `$` is escaped for Kubernetes."""
    name, slices, spot = values["name"], int(values["slices"]), values["spot"] == "1"
    first = f"{name}-train-0-0.{name}"
    own = {
        "AGENTR1_COORDINATOR": f"{first}:{values['port']}",
        "AGENTR1_NUM_PROCESSES": str(slices * int(values["hosts"])),
        "VENV_PYTHON": "python3",
    }
    if slices > 1:
        own |= {"MEGASCALE_COORDINATOR_ADDRESS": f"{first}:8081", "MEGASCALE_PORT": "8081"}
        own["MEGASCALE_NUM_SLICES"] = str(slices)
    index = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['jobset.sigs.k8s.io/job-index']"}}}
    entries: list[dict[str, object]] = [{"name": "SLICE", **index}]
    if slices > 1:
        entries.append({"name": "MEGASCALE_SLICE_ID", **index})
    entries += [{"name": key, "value": value.replace("$", "$$")} for key, value in (own | env).items()]
    selector = {
        "cloud.google.com/gke-tpu-accelerator": values["accelerator"],
        "cloud.google.com/gke-tpu-topology": values["topology"],
    }
    taint = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    parts = {
        "labels": {"kueue.x-k8s.io/queue-name": values["queue"]} if values["queue"] else {},
        "node_selector": selector | ({"cloud.google.com/gke-spot": "true"} if spot else {}),
        "tolerations": [taint] if spot else [],
        "env_from": [{"secretRef": {"name": f"{name}-secrets"}}] if values["secrets"] != "0" else [],
        "env": entries,
        "arguments": [argument.replace("$", "$$") for argument in arguments],
    }
    return string.Template(template).substitute(values, **{key: json.dumps(part) for key, part in parts.items()})


def main(argv: Sequence[str]) -> int:
    """Print the manifest for `FILE KEY=VALUE ... -- ARGUMENTS...` and return the exit status."""
    path, end = pathlib.Path(argv[0]), argv.index("--")
    words = [word.partition("=")[::2] for word in argv[1:end]]
    env = dict(value.partition("=")[::2] for key, value in words if key == "env")
    of_run = {key: value for key, value in words if key != "env"}
    try:
        values = read_values(path)
        for key in values.keys() & of_run.keys():
            raise Mistake(f"{path}: {key} is no value of the cluster; give it as --{key}")
        values |= of_run
        check(values, path)
    except Mistake as mistake:
        sys.stderr.write(f"error: {mistake}\n")
        return 2
    sys.stdout.write(render(TEMPLATE.read_text(encoding="utf-8"), values, env, argv[end + 1 :]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

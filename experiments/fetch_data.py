"""Copy a data folder from a bucket to this machine, but for files that it has; launch/worker.sh does it on each worker.

python -m experiments.fetch_data gs://BUCKET/FOLDER FOLDER
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from absl import logging

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime import config as configs


def main(argv: Sequence[str]) -> None:
    """Copy the files whose sizes differ."""
    _, source, folder = argv
    files.check_reachable(source, "--data")
    sizes = files.file_sizes(source)
    if not sizes:
        raise UserError(f"--data={source}: no such folder in the bucket, or an empty one")
    here = files.file_sizes(folder)
    missing = [name for name, size in sizes.items() if here.get(name) != size]
    logging.info("%s: %d of %d files are copied to %s", source, len(missing), len(sizes), folder)
    for name in missing:
        files.copy(os.path.join(source, name), os.path.join(folder, name))


if __name__ == "__main__":
    configs.run_main(main, ["SOURCE", "FOLDER"])

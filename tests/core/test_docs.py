"""Links of the README and the guide lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from agentr1_jax.runtime.run_folder import RESUMABLE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_resolve() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = page if not path else page.parent / path
            if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_paths_exist() -> None:
    missing = []
    for page in PAGES:
        if "results" not in page.parts and page.name != "CHANGELOG.md":
            text = page.read_text(encoding="utf-8")
            paths = re.findall(r"\b((?:agentr1_jax|experiments|launch|tests)/[\w/]+\.\w+)", text)
            paths += [
                f"experiments/{module.replace('.', '/')}.py" for module in re.findall(r"-m experiments\.([\w.]+)", text)
            ]
            missing += [f"{page.relative_to(ROOT)}: {path}" for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_keys_exist() -> None:
    """Keys that pages name in code, bare or as `--config.key=value`, are those of the generated reference."""
    keys = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "config.md").read_text("utf-8"), re.MULTILINE)
    known = {key.rsplit(".", n)[0] for key in keys for n in range(key.count(".") + 1)}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    unknown = []
    for page in PAGES:
        if "results" not in page.parts and page.name not in ("CHANGELOG.md", "config.md", "metrics.md"):
            named = re.findall(r"(?:`|--config\.)(\w+\.[\w.]*\w)(?=[=`])", page.read_text("utf-8"))
            unknown += [
                f"{page.name}: {key}" for key in named if key.partition(".")[0] in sections and key not in known
            ]
    files_and_own_arguments = re.compile(r"\.json$|\.args\.")
    assert [key for key in unknown if not files_and_own_arguments.search(key)] == []


def test_keys_that_may_change_are_listed() -> None:
    page = (ROOT / "docs" / "durability.md").read_text("utf-8")
    (listed,) = re.findall(r"\*\*Keys that may change\*\*(.*?)\n\n", page, re.DOTALL)
    assert set(re.findall(r"`([\w.]+)`", listed)) == set(RESUMABLE)


def test_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    names = [str(page.relative_to(ROOT / "docs")) for page in PAGES if ROOT / "docs" in page.parents]
    assert [name for name in names if name != "README.md" and f"({name})" not in index] == []

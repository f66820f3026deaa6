"""What MkDocs does not see: links of the pages beside docs/, and that the index names every page."""

import re
from pathlib import Path

import pytest

import edgc
import megatron.edgc

REPOSITORY = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and MkDocs name them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}


@pytest.mark.parametrize("page", sorted(REPOSITORY.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text()):
        target = REPOSITORY / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_the_index_names_every_page() -> None:
    docs = REPOSITORY / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"index.md"}
    assert {path for path, _ in LINK.findall((docs / "index.md").read_text())} == pages


def test_the_page_of_hosts_has_every_public_name() -> None:
    page = (REPOSITORY / "docs" / "hosts.md").read_text()
    table = page[page.index("## All names") :]
    assert [name for name in (*edgc.__all__, *megatron.edgc.__all__) if not re.search(rf"\b{name}\b", table)] == []
    methods = re.findall(r"state\.(\w+)", table)
    assert methods and all(hasattr(edgc.EDGCState, name) or name == "report" for name in methods)

"""Every link between the files of the repository leads somewhere."""

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, name_of
from tests.docs.links import FILES, anchors_of, faults_of


@pytest.mark.parametrize("page", FILES, ids=name_of)
def test_the_links_and_anchors_of_a_page_exist(page: Path) -> None:
    assert faults_of(page) == []


def test_the_list_of_decisions_has_every_record_with_its_heading() -> None:
    folder = ROOT / "docs" / "decisions"
    heads = {path.name: path.read_text("utf-8").splitlines()[0] for path in folder.glob("0*.md")}
    expected = [f"- [{heads[name].removeprefix('# ')}]({name})" for name in sorted(heads)]
    listed = (folder / "README.md").read_text("utf-8").splitlines()
    assert [line for line in listed if line.startswith("- [0")] == expected


def test_wrong_links_and_anchors_are_found(tmp_path: Path) -> None:
    page = ROOT / "docs" / "plans.md"
    (tmp_path / "a.md").write_text("[x](no.md) [y](#no)", "utf-8")
    assert faults_of(tmp_path / "a.md") == ["no.md does not exist", " has no heading #no"]
    assert {"layouts", "your-own-packer"} <= anchors_of(page.read_text("utf-8"))


def test_the_site_makes_the_anchors_of_github() -> None:
    from pymdownx.slugs import slugify

    for heading in ("One & two", "Groups, limits, long samples", "Plan.save", "Über `x_y` – z"):
        made = slugify(case="lower")(heading.replace("`", ""), "-")
        assert made in anchors_of(f"# {heading}")

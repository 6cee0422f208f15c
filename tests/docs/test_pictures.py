"""The pictures of the documentation are current, and have colours for light and for dark pages."""

from pathlib import Path

import pytest

from docs.pictures import draw
from tests.docs.blocks import DOCS, name_of

PICTURES = sorted((DOCS / "pictures").glob("*.svg"))


def test_the_pictures_are_what_the_project_draws_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw, "HERE", tmp_path)
    draw.main()
    drawn = {path.name: path.read_text("utf-8") for path in tmp_path.glob("*.svg")}
    assert drawn.keys() == {path.name for path in PICTURES}
    different = [path.name for path in PICTURES if path.read_text("utf-8") != drawn[path.name]]
    assert different == [], "run python -m docs.pictures.draw"


@pytest.mark.parametrize("picture", PICTURES, ids=name_of)
def test_a_picture_has_light_and_dark_colours_and_loads_nothing(picture: Path) -> None:
    text = picture.read_text("utf-8")
    assert "@media(prefers-color-scheme:dark)" in text
    assert text.count("http") == text.count("http://www.w3.org/2000/svg")
    assert "<title>" in text

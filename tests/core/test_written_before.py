"""Files and pickles of version 0.1.0, written before its modules were merged, still load."""

import json
import pickle
from pathlib import Path

import pytest

from evenstep import Cursor, Packed, Padded, Plan, SecondWork, World, make_plan

FILES = Path(__file__).parent / "written_before"


@pytest.mark.parametrize(
    ("name", "fingerprint"),
    [
        ("packed", "7fadac2559ed9153cf76dc6dcb1e6842ab3f0fc948cc689282f991f61b308fe5"),
        ("padded", "c148936dfee842c649641862650aaad120192aa13ceb15a9cb7fe19420ef40ae"),
    ],
)
def test_a_plan_file_has_the_fingerprint_that_it_had(name: str, fingerprint: str) -> None:
    plan = Plan.load(FILES / f"{name}.plan")
    assert plan.fingerprint == fingerprint
    assert plan.to_bytes() == (FILES / f"{name}.plan").read_bytes()
    assert make_plan(plan.lengths, plan.recipe, columns=plan.columns) == plan


def test_a_cursor_is_read_and_written_as_it_was() -> None:
    state = json.loads((FILES / "cursor.json").read_text())
    cursor = Cursor.from_dict(state)
    assert (cursor.identity, cursor.step, cursor.position) == (
        {"seed": "0", "stream": "planned"},
        3,
        {"epoch": 0, "position": 24},
    )
    assert cursor.to_dict() == state


def test_pickles_of_every_value_load() -> None:
    values = pickle.loads((FILES / "values.pickle").read_bytes())
    plan = values["plan"]
    assert plan == Plan.load(FILES / "packed.plan")
    assert plan.recipe.layout == Packed(max_tokens=8)
    assert plan.recipe.second_work == SecondWork(column="patches")
    assert plan.recipe.limits.columns == {"patches": 9}
    assert (values["padded"], values["world"]) == (Padded(samples=2), World(1, 2))
    assert values["cursor"] == Cursor(identity={"seed": "0"}, step=3, position={"epoch": 0})
    assert values["micro"][0].segments.sample.tolist() == plan[0, 0][0].segments.sample.tolist()
    assert values["gpu"].name == "h200"
    assert pickle.loads(pickle.dumps(values))["plan"] == plan

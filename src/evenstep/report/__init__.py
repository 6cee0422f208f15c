"""What a plan looks like: Plan -> **tables, SVG, HTML, simulated time**. Nothing prints or plans.

>>> from evenstep import Packed, Recipe, make_plan
>>> from evenstep.report import plan_picture
>>> plan_picture(make_plan([5, 3], Recipe(layout=Packed(max_tokens=8))))[:4]
'<svg'
"""

from typing import TYPE_CHECKING

from evenstep.lazy import exports

if TYPE_CHECKING:
    from evenstep.report.comparison import Entry
    from evenstep.report.page import comparison_page, plan_page
    from evenstep.report.picture import comparison_picture, plan_picture
    from evenstep.report.simulation.cluster import Cluster
    from evenstep.report.simulation.simulate import Simulation, simulate
    from evenstep.report.tables import Row, Section, sections

__all__ = [
    "Cluster",
    "Entry",
    "Row",
    "Section",
    "Simulation",
    "comparison_page",
    "comparison_picture",
    "plan_page",
    "plan_picture",
    "sections",
    "simulate",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "comparison": ["Entry"],
            "page": ["comparison_page", "plan_page"],
            "picture": ["comparison_picture", "plan_picture"],
            "simulation.cluster": ["Cluster"],
            "simulation.simulate": ["Simulation", "simulate"],
            "tables": ["Row", "Section", "sections"],
        },
    )

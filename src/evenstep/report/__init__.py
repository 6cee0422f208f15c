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
    from evenstep.report.fitting import FittedCost, fit_cost
    from evenstep.report.page import comparison_page, plan_page
    from evenstep.report.picture import comparison_picture, plan_picture
    from evenstep.report.png import png_of
    from evenstep.report.report import Report
    from evenstep.report.report_html import report_page
    from evenstep.report.run_log import RunLog
    from evenstep.report.simulation.cluster import Cluster
    from evenstep.report.simulation.device import named_cluster
    from evenstep.report.simulation.simulate import Simulation, simulate
    from evenstep.report.suggestions import Advice, advice
    from evenstep.report.tables import Row, Section, sections

__all__ = [
    "Advice",
    "Cluster",
    "Entry",
    "FittedCost",
    "Report",
    "Row",
    "RunLog",
    "Section",
    "Simulation",
    "advice",
    "comparison_page",
    "comparison_picture",
    "fit_cost",
    "named_cluster",
    "plan_page",
    "plan_picture",
    "png_of",
    "report_page",
    "sections",
    "simulate",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "suggestions": ["Advice", "advice"],
            "comparison": ["Entry"],
            "fitting": ["FittedCost", "fit_cost"],
            "page": ["comparison_page", "plan_page"],
            "picture": ["comparison_picture", "plan_picture"],
            "png": ["png_of"],
            "report": ["Report"],
            "report_html": ["report_page"],
            "run_log": ["RunLog"],
            "simulation.cluster": ["Cluster"],
            "simulation.device": ["named_cluster"],
            "simulation.simulate": ["Simulation", "simulate"],
            "tables": ["Row", "Section", "sections"],
        },
    )

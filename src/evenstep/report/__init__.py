"""What a plan looks like: Plan -> **tables, SVG, HTML**.

Text and numbers only: nothing here prints, and nothing here plans.
"""

from evenstep.report.comparison import Entry
from evenstep.report.page import comparison_page, plan_page
from evenstep.report.picture import comparison_picture, plan_picture
from evenstep.report.tables import Row, Section, sections

__all__ = [
    "Entry",
    "Row",
    "Section",
    "comparison_page",
    "comparison_picture",
    "plan_page",
    "plan_picture",
    "sections",
]

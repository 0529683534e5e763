"""Views as one self-contained page, which fetches nothing and runs no script. The folder page has its templates and style.

The drawings are made by a template, too. Plotting libraries were tried: they draw to a fixed width with colours and fonts of
their own, at 9 to 18 kB for a small chart, or need a script in the page.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from forerun.bench.pages.view import Axis, View

SIGNS = {"faster": "▲", "slower": "▼", "no difference": "=", "not enough data": "?"}
"""The sign before a verdict, so that verdicts do not differ by colour alone."""
FEW = 16  # rows of figures that a page shows unfolded
PLOT = 190  # the height of a plot in pixels, with 6 above it and its labels below


def page(*views: View) -> str:
    """Every text is escaped."""
    few = [sum(len(t.rows) for part in view.parts for t in part.tables[:1]) <= FEW for view in views]
    return filled("page.html.j2", views[0].heading, views=views, few=few, signs=SIGNS)


def filled(template: str, title: str, **values: Any) -> str:
    """A page in the common frame. Every text is escaped."""
    style = resources.files("forerun.bench.pages").joinpath("page/style.css").read_text(encoding="utf-8")
    return templates().get_template(template).render(style=Markup(style), title=title, **values)


def templates() -> Environment:
    """Those of the folder page."""
    made = Environment(
        loader=PackageLoader("forerun.bench.pages", "page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    made.filters["options"] = options
    made.globals["down"] = down
    return made


def down(axis: Axis, value: float) -> float:
    """The place of a value in a plot, in pixels from above."""
    return 6 + (1 - axis.at(value)) * (PLOT - 6)


def options(text: str) -> Markup:
    """The text with options of the command line as code, which is not broken."""
    return Markup(re.sub(r"--[a-z-]+( \d+)?", r"<code>\g<0></code>", str(escape(text))))

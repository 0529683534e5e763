"""Views as one self-contained page, which fetches nothing and runs no script. The folder page has its template and style."""

from __future__ import annotations

import re
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from forerun.bench.pages import svg
from forerun.bench.pages.view import View

SIGNS = {"faster": "▲", "slower": "▼", "no difference": "=", "not enough data": "?"}
"""The sign before a verdict, so that verdicts do not differ by colour alone."""
FEW = 16  # rows of figures that a page shows unfolded


def page(*views: View) -> str:
    """Every text is escaped."""
    environment = Environment(
        loader=PackageLoader("forerun.bench.pages", "page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["options"] = options
    style = resources.files("forerun.bench.pages").joinpath("page/style.css").read_text(encoding="utf-8")
    few = [sum(len(t.rows) for part in view.parts for t in part.tables[:1]) <= FEW for view in views]
    return environment.get_template("page.html.j2").render(style=Markup(style), views=views, few=few, svg=svg, signs=SIGNS)


def options(said: str) -> Markup:
    """The text with options of the command line as code, which is not broken."""
    return Markup(re.sub(r"--[a-z-]+( \d+)?", r"<code>\g<0></code>", str(escape(said))))

"""Reports of runs: a self-contained HTML page, or a card in Markdown."""

from jaxscale.reporting.card import make_card
from jaxscale.reporting.page import make_evals_page, make_page

__all__ = ["make_card", "make_evals_page", "make_page"]

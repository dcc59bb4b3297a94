"""A run as one HTML file that needs nothing else."""

from jaxscale.monitor.report.page import make_page

__all__ = ["make_page"]

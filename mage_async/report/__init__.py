"""A run as one page: self-contained HTML, drawn by us, readable without a network."""

from mage_async.report.page import render

__all__ = ["render"]

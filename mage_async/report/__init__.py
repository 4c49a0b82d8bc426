"""Runs as pages: self-contained HTML, laid out by our templates, readable without a network."""

from mage_async.report.run_page import render

__all__ = ["render"]

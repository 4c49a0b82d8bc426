"""Environments whose actions are calls of tools."""

from mage_async.environments.tools.declare import tool

__all__ = ["tool"]

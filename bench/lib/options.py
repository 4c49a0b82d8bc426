"""Parse a benchmark's command line."""

import argparse


def option_parser(documentation: str | None) -> argparse.ArgumentParser:
    """Return a parser whose `--help` shows a module's docstring as written, then the options."""
    return argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )

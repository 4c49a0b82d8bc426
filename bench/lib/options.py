"""Options of a benchmark's command line."""

import argparse


def option_parser(documentation: str | None) -> argparse.ArgumentParser:
    """A parser whose `--help` shows a module's documentation as written, then the options."""
    return argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )

"""Count the product's files and lines of code: `python -m bench.lib.code_size`.

A line of code holds at least one token that is neither a comment nor part of a docstring, so blank
lines, comments and docstrings do not count. The product is `mage_async`, `kernels` and `services`.
"""

import ast
import io
import tokenize
from pathlib import Path

from bench.lib.options import option_parser

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("mage_async", "kernels", "services")
# Types of tokens that are no code.
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Return the number of lines of a module that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        # A string as a statement is the docstring of a module, class, function or field.
        is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_constant and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def main() -> None:
    """Print files and lines of code of each folder of the product, and their sums."""
    option_parser(__doc__).parse_args()
    num_files = num_lines = 0
    for folder in PRODUCT:
        files = sorted((ROOT / folder).rglob("*.py"))
        lines = sum(code_lines(file.read_text(encoding="utf-8")) for file in files)
        print(f"{folder:12} {len(files):5} files {lines:7,} lines of code")
        num_files, num_lines = num_files + len(files), num_lines + lines
    print(f"{'all':12} {num_files:5} files {num_lines:7,} lines of code")


if __name__ == "__main__":
    main()

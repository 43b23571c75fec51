"""Tables that read well as text and as Markdown."""
from typing import Sequence


def markdown_table(header: Sequence[str],
                   rows: Sequence[Sequence[object]]) -> str:
    """Markdown table, the first column to the left, the rest to the right."""
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells)]
    rule = ['-' * widths[0], *('-' * (w - 1) + ':' for w in widths[1:])]
    cells.insert(1, rule)
    return '\n'.join('| ' + ' | '.join(
        cell.rjust(width) if i else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(row, widths))) + ' |'
                     for row in cells)

"""Parameters, MACs and FLOPs of configs, by component.

Needs neither data nor weights nor the network.

Example:
    python tools/get_complexity.py configs/sasa/*.py --shape 800 1344
    python tools/get_complexity.py --papers
"""
import argparse
import csv
import io
import json
import os.path as osp
import sys
from pathlib import Path

from mmengine.config import Config

import acmix_det  # noqa: F401
from acmix_det.evaluation import build_detector, count_complexity
from acmix_det.evaluation.markdown import markdown_table
from acmix_det.ops.local_attention import CONVENTIONS

HEADER = ('config', 'component', 'params (M)', 'MACs (G)', 'FLOPs (G)',
          'params saved', 'FLOPs saved')


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('configs', nargs='*', help='config files')
    parser.add_argument('--shape', type=int, nargs='+', default=[800, 1344],
                        metavar=('HEIGHT', 'WIDTH'),
                        help='image size in pixels; one number for a square '
                        '(default: 800 1344)')
    parser.add_argument('--baseline', help='config that the others are '
                        'compared with (default: the first one)')
    parser.add_argument('--convention', choices=CONVENTIONS,
                        default='executed',
                        help='q.r of SASA: what is executed (separable), or '
                        "the paper's count (default: %(default)s)")
    parser.add_argument('--total', action='store_true',
                        help='one row for each config, no components')
    parser.add_argument('--format', choices=('md', 'csv', 'json'),
                        default='md', help='default: %(default)s')
    parser.add_argument('--papers', action='store_true',
                        help='compare with the published figures instead; '
                        'exit status 1 if one is not reproduced (rows with a '
                        'note, which says why, are excepted)')
    args = parser.parse_args()
    if args.papers and args.configs:
        parser.error('configs must be left out with --papers, got '
                     f'{" ".join(args.configs)}')
    if not args.papers and not args.configs:
        parser.error('configs must name at least one file (or use --papers)')
    if len(args.shape) > 2 or min(args.shape) < 1:
        parser.error('--shape must be one or two positive numbers, got '
                     f'{args.shape}')
    for path in [*args.configs, *filter(None, [args.baseline])]:
        if not osp.isfile(path):
            parser.error(f'configs must be files, got {path}')
    return args


def show(header, rows, kind):
    if kind == 'json':
        return json.dumps([dict(zip(header, row)) for row in rows], indent=2)
    if kind == 'csv':
        text = io.StringIO()
        csv.writer(text).writerows([header, *rows])
        return text.getvalue().rstrip()
    return markdown_table(header, rows)


def saved(value, baseline):
    return f'{100 * (1 - value / baseline):.1f} %' if baseline else '-'


def rows_of(path, cost, baseline, total_only):
    parts = [] if total_only else list(cost.parts.items())
    for name, part in [*parts, ('total', cost)]:
        first = baseline if name == 'total' else baseline.parts.get(name)
        yield (Path(path).stem, name, round(part.params / 1e6, 3),
               round(part.macs / 1e9, 3), round(part.flops / 1e9, 3),
               saved(part.params, first and first.params),
               saved(part.flops, first and first.flops))


def papers():
    """Print published next to computed; return whether all fit."""
    from acmix_det.evaluation.papers import all_cells
    header = ('model', 'quantity', 'published', 'computed', 'difference', '')
    notes, fit = [], True
    for title, cells in all_cells():
        rows = []
        for cell in cells:
            mark = '' if cell.fits else 'NOT REPRODUCED'
            if cell.note:
                if cell.note not in notes:
                    notes.append(cell.note)
                mark = f'[{notes.index(cell.note) + 1}]'
            number = '{:,}' if cell.quantity == 'params' else '{:.2f}'
            rows.append((cell.model, cell.quantity,
                         f'{cell.published:,}', number.format(cell.computed),
                         number.format(cell.difference), mark))
            fit &= cell.fits
        print(f'\n## {title}\n\n{markdown_table(header, rows)}')
    print()
    for i, note in enumerate(notes, 1):
        print(f'[{i}] {note}')
    return fit


def main():
    args = parse_args()
    if args.papers:
        sys.exit(0 if papers() else 1)
    size = (args.shape[0], args.shape[-1])

    def count(path):
        cfg = Config.fromfile(path)
        if 'model' not in cfg:
            sys.exit(f'configs must hold a model, got {path}')
        try:
            return count_complexity(
                build_detector(cfg), size, args.convention)
        except (AssertionError, TypeError) as error:
            # tensor modes that need more than an image (DETR)
            sys.exit('configs must hold a one-stage or two-stage detector '
                     f'that an image alone is enough for, got {path} '
                     f'({cfg.model.type}): {error!r}')

    costs = {path: count(path) for path in args.configs}
    first = args.baseline or args.configs[0]
    baseline = costs[first] if first in costs else count(first)
    rows = [
        row for path, cost in costs.items()
        for row in rows_of(path, cost, baseline, args.total)
    ]
    print(show(HEADER, rows, args.format))
    if args.format == 'md':
        counted = dict(executed='executed', paper='in the paper')
        print(f'\nOne image of {size[0]} x {size[1]}; MAC: a multiply-add, '
              f'FLOPs = 2 x MACs; saved: less than {Path(first).stem}; q.r '
              f'counted as {counted[args.convention]}.')


if __name__ == '__main__':
    main()

"""Find bad annotations and images of a COCO data set before training.

The exit status is 1 if there are errors.

Example:
    python tools/check_dataset.py configs/digits/retinanet_r18_fpn_digits.py
    python tools/check_dataset.py --ann-file train.json --img-root train/
"""
import argparse
import json
import os.path as osp
import sys
from pathlib import Path

from mmengine.config import Config

import acmix_det  # noqa: F401
from acmix_det.datasets.check_coco import check_coco
from acmix_det.datasets.data_config import check_classes, coco_splits


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', nargs='?', help='config file')
    parser.add_argument('--split', nargs='+', default=['train', 'val', 'test'],
                        choices=('train', 'val', 'test'),
                        help='data sets of the config (default: all)')
    parser.add_argument('--ann-file', help='annotation file, without a config')
    parser.add_argument('--img-root', help='folder of its images')
    parser.add_argument('--no-images', action='store_true',
                        help='leave the image files alone')
    parser.add_argument('--decode', action='store_true',
                        help='load every image whole, which finds files that '
                        'were cut off, instead of its header alone')
    parser.add_argument('--json', metavar='FILE',
                        help='write the report as JSON as well')
    args = parser.parse_args()
    if (args.config is None) == (args.ann_file is None):
        parser.error('give a config or --ann-file, one of them')
    if args.config is not None and not osp.isfile(args.config):
        parser.error(f'config must be a file, got {args.config}')
    if args.config is not None and args.img_root is not None:
        parser.error('--img-root must be given with --ann-file, not with a '
                     'config, which names the folders')
    if args.ann_file and args.img_root is None and not args.no_images:
        parser.error('--img-root must be given with --ann-file, unless '
                     '--no-images is')
    if args.decode and args.no_images:
        parser.error('--decode must not be given with --no-images')
    if args.img_root is not None and not osp.isdir(args.img_root):
        parser.error(f'--img-root must be a folder, got {args.img_root}')
    return args


def check_config(args):
    """Problem with the classes ('' if none), and the reports by split."""
    cfg = Config.fromfile(args.config)
    splits = coco_splits(cfg, args.split)
    try:
        check_classes(cfg)
        problem = ''
    except ValueError as error:
        problem = str(error)
    reports, checked = [], {}
    for split in splits:
        usable = isinstance(split.classes, (list, tuple)) and all(
            isinstance(name, str) for name in split.classes)
        classes = tuple(split.classes) if usable else None
        key = (split.ann_file, split.img_root, classes)
        if key in checked:  # often val and test are the same
            reports[checked[key]][0] += f', {split.name}'
            continue
        checked[key] = len(reports)
        root = None if args.no_images else split.img_root
        reports.append(
            [split.name, check_coco(split.ann_file, root, classes, True,
                                    args.decode)])
    return problem, reports


def show(name, report):
    numbers = ', '.join(f'{n} {what}' for what, n in report.counts.items())
    print(f'\n{name}{report.ann_file}: {numbers or "not read"}')
    rows = [(f.level, str(f.count), f.kind) for f in report.findings]
    if not rows:
        print('  nothing found')
        return
    widths = [max(map(len, column)) for column in zip(*rows)]
    for finding, (level, count, kind) in zip(report.findings, rows):
        print(f'  {level:{widths[0]}}  {count:>{widths[1]}}  {kind}')
        indent = ' ' * (widths[0] + widths[1] + 6)
        for example in finding.examples:
            print(f'{indent}{example}')
        if finding.examples and finding.count > len(finding.examples):
            print(f'{indent}...')


def main():
    args = parse_args()
    problem, reports = '', []
    if args.config is not None:
        try:
            problem, reports = check_config(args)
        except ValueError as error:
            sys.exit(f'check_dataset.py: error: {error}')
    else:
        root = None if args.no_images else args.img_root
        reports = [['', check_coco(args.ann_file, root, progress=True,
                                    decode=args.decode)]]

    if problem:
        print(f'error: {problem}')
    for name, report in reports:
        show(f'{name}: ' if name else '', report)
    errors = bool(problem) + sum(r.num_errors for _, r in reports)
    print(f'\n{errors} errors' if errors else '\nno errors')
    if args.json:
        content = dict(
            num_errors=errors,
            classes=problem or None,
            files=[dict(split=name or None, **report.as_dict())
                   for name, report in reports])
        Path(args.json).write_text(json.dumps(content, indent=2) + '\n')
    sys.exit(1 if errors else 0)


if __name__ == '__main__':
    main()

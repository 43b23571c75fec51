"""Make the digits detection data set.

Example:
    python tools/make_digits.py data/digits
"""
import argparse

from acmix_det.datasets import make_digits


def parse_args():
    parser = argparse.ArgumentParser(
        description='Make a small detection data set of handwritten digits')
    parser.add_argument(
        'data_root',
        nargs='?',
        default='data/digits',
        help='folder to make (default: %(default)s)')
    parser.add_argument(
        '--seed', type=int, default=0, help='default: %(default)s')
    parser.add_argument(
        '--num-train',
        type=int,
        default=2800,
        help='number of training images (default: %(default)s)')
    parser.add_argument(
        '--num-val',
        type=int,
        default=200,
        help='number of validation images (default: %(default)s)')
    parser.add_argument(
        '--image-size',
        type=int,
        default=128,
        help='height and width in pixels (default: %(default)s)')
    parser.add_argument(
        '--num-workers',
        type=int,
        default=0,
        help='worker processes; the result does not depend on it '
        '(default: %(default)s, no extra process)')
    parser.add_argument(
        '--force',
        action='store_true',
        help='replace a set that was made with other arguments')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    try:
        written = make_digits(**vars(args))
    except (ValueError, FileExistsError, ImportError) as e:
        parser.error(str(e))
    print(f'{"Wrote" if written else "Found"} the digits data set in '
          f'{args.data_root}')


if __name__ == '__main__':
    main()

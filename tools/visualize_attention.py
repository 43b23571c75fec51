"""Draw what a SASA or ACmix layer looks at, or how ACmix mixes its paths.

Positions are pixels of the image file, from the upper left corner.

Example:
    python tools/visualize_attention.py CONFIG CHECKPOINT --list
    python tools/visualize_attention.py CONFIG CHECKPOINT --image IMAGE \\
        --layer backbone.layer3.0.conv2 --position 320 200 --out attention.png
    python tools/visualize_attention.py CONFIG CHECKPOINT --mixing
"""
import argparse
import os.path as osp
import sys
import textwrap
from pathlib import Path

from mmengine.config import Config
from mmengine.runner import load_checkpoint

import acmix_det  # noqa: F401
from acmix_det.evaluation import build_detector
from acmix_det.evaluation.attention_maps import (attention_layers, read_image,
                                                 view_attention)
from acmix_det.evaluation.attention_plots import draw_attention, draw_mixing
from acmix_det.evaluation.mixing import mixing, mixing_table


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', nargs='?',
                        help='weights (default: random ones)')
    parser.add_argument('--image', help='image file')
    parser.add_argument('--layer', help='name of an attention layer '
                        '(default: the last one in the backbone)')
    parser.add_argument('--level', type=int, default=0,
                        help='which map, for a layer that several go through '
                        '(head towers); 0 is the finest (default)')
    parser.add_argument('--out', default='attention.png',
                        help='picture to write (default: %(default)s)')
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument('--position', type=int, nargs=2, metavar=('X', 'Y'),
                      help='pixel of the image')
    what.add_argument('--click', action='store_true',
                      help='choose the pixel in a window')
    what.add_argument('--list', action='store_true',
                      help='print the attention layers')
    what.add_argument('--mixing', action='store_true',
                      help='print and draw alpha and beta of all ACmix layers')
    args = parser.parse_args()
    for name in ('config', 'checkpoint', 'image'):
        path = getattr(args, name)
        if path is not None and not osp.isfile(path):
            parser.error(f'{name} must be a file, got {path}')
    if (args.position or args.click) and args.image is None:
        parser.error('--image must be given with --position and --click')
    return args


def load_model(args, cfg):
    model = build_detector(cfg)
    if args.checkpoint is None:
        print('No checkpoint was given: the weights are random.',
              file=sys.stderr)
        return model
    try:
        load_checkpoint(
            model, args.checkpoint, 'cpu', strict=True, logger='silent')
    except (RuntimeError, KeyError, TypeError) as error:
        # one line for each kind of difference, which may name every key
        lines = [textwrap.shorten(line, 200, placeholder=' ...')
                 for line in str(error).splitlines() if line]
        raise ValueError('checkpoint must hold the weights of the config, '
                         f'got {args.checkpoint}: ' + '\n'.join(lines[:5])
                         ) from error
    return model


def click(path):
    """Let the user choose a pixel of an image in a window."""
    from matplotlib import pyplot
    image = read_image(path)
    no_window = ('--click must have a display to open a window on, got none; '
                 'use --position X Y')
    try:
        figure, axis = pyplot.subplots()
    except ImportError as error:
        raise ValueError(f'{no_window} ({error})') from error
    if figure.canvas.required_interactive_framework is None:
        raise ValueError(no_window)
    axis.imshow(image)
    axis.set_title('click on a position')
    points = pyplot.ginput(1, timeout=0)
    pyplot.close(figure)
    if not points:
        raise ValueError('--click must get a position, got a closed window')
    return tuple(round(i) for i in points[0])


def last_layer(names):
    backbone = [name for name in names if name.startswith('backbone.')]
    return (backbone or names)[-1]


def run(args):
    position = click(args.image) if args.click else args.position
    cfg = Config.fromfile(args.config)
    model = load_model(args, cfg)
    layers = attention_layers(model)
    if not layers and not args.mixing:
        raise ValueError('config must have attention layers, got '
                         f'{args.config} without one')
    if args.list:
        for name, layer in layers.items():
            print(f'{name}  {type(layer).__name__}({layer.extra_repr()})')
        return
    if args.mixing:
        mixes = mixing(model)
        print(mixing_table(mixes))
        figure = draw_mixing(mixes)
    else:
        name = args.layer or last_layer(list(layers))
        view = view_attention(model, cfg, args.image, name, position,
                              args.level)
        figure = draw_attention(view)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=120)
    print(f'Wrote {args.out}')


def main():
    try:
        run(parse_args())
    except ValueError as error:
        sys.exit(f'visualize_attention.py: error: {error}')


if __name__ == '__main__':
    main()

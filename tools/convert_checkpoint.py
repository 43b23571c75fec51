"""Convert a released ACmix checkpoint for init_cfg.

Reads .pth (tensors only, nothing is unpickled) or .safetensors of a released
ACmix layer, ResNet or Swin Transformer and writes the weights under the names
of this package, for init_cfg=dict(type='Pretrained', checkpoint=...).

Example:
    python tools/convert_checkpoint.py acmix_resnet50.pth acmix_r50.pth \\
        --config configs/acmix/retinanet_r50-acmix_fpn_1x_coco.py
"""
import argparse
import os.path as osp
import pickle
import re
import sys
from pathlib import Path

import torch
from mmengine.config import Config

import acmix_det  # noqa: F401
from acmix_det.checkpoints import convert_acmix
from acmix_det.compat.checkpoint_loader import load_from_local
from acmix_det.evaluation import build_detector


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path,
                        help='released checkpoint, .pth or .safetensors')
    parser.add_argument('target', type=Path, help='file to write, .pth')
    parser.add_argument('--config', type=Path,
                        help='check the names and shapes against the backbone '
                        'of this config')
    parser.add_argument('--force', action='store_true',
                        help='replace the target if it exists')
    args = parser.parse_args()
    for name, path in (('source', args.source), ('--config', args.config)):
        if path is not None and not osp.isfile(path):
            parser.error(f'{name} must be a file, got {path}')
    if args.target.suffix != '.pth':
        parser.error(f'target must end with .pth, got {args.target}')
    if osp.exists(args.target) and not args.force:
        parser.error(f'target must not exist (or use --force), got '
                     f'{args.target}')
    return args


def read(path):
    """Weights of a file, without running anything that it holds."""
    if path.suffix == '.safetensors':
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        except ImportError:
            sys.exit(f'{path} needs the package safetensors: '
                     'pip install safetensors')
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            sys.exit(f'source must be a safetensors file, got {path}: {error}')
    try:
        return load_from_local(str(path), 'cpu')
    except pickle.UnpicklingError as error:
        sys.exit(f'source must hold tensors and plain types only, got {path}: '
                 f'{error}')
    except Exception as error:  # the unpickler's, of any kind
        sys.exit(f'source must be a PyTorch checkpoint, got {path}: {error}')


def check(state, config):
    """Compare with the backbone of a config; return the differences."""
    model = build_detector(Config.fromfile(config)).backbone
    own = model.state_dict()
    # a detector's Swin has norms behind its stages that no release has
    differences = [
        f'missing: {key}' for key in own
        if key not in state and not re.fullmatch(r'norm\d\..*', key)
    ]
    for key, value in state.items():
        if key not in own:
            differences.append(f'unexpected: {key}')
        elif value.shape != own[key].shape:
            differences.append(f'shape of {key}: {tuple(value.shape)}, the '
                               f'backbone has {tuple(own[key].shape)}')
    return differences


def main():
    args = parse_args()
    try:
        state = convert_acmix(read(args.source))
    except (TypeError, ValueError) as error:
        sys.exit(f'{args.source}: {error}')
    if args.config is not None:
        differences = check(state, args.config)
        if differences:
            shown = '\n  '.join(differences[:20])
            sys.exit(f'--config must fit the checkpoint, got {args.config} '
                     f'with {len(differences)} differences:\n  {shown}')
        print(f'All {len(state)} tensors fit the backbone of {args.config}')
    args.target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(state_dict=state), args.target)
    print(f'Wrote {len(state)} tensors to {args.target}; use them by\n'
          f"init_cfg=dict(type='Pretrained', checkpoint='{args.target}')")


if __name__ == '__main__':
    main()

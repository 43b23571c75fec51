"""Time and memory of whole detectors, or of their backbones.

Without configs: RetinaNet-R50 of MMDetection with convolution, SASA and ACmix.
Needs neither data nor weights nor the network.

Example:
    python tools/benchmark_detector.py --shape 640 --memory
    python tools/benchmark_detector.py configs/digits/*.py --shape 128
"""
import argparse
import copy
import os.path as osp
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.hub import get_config

import acmix_det  # noqa: F401
from acmix_det.evaluation import build_detector
from acmix_det.evaluation.benchmark_report import (add_options, as_dicts,
                                                   check_options, environment,
                                                   header, run_rows,
                                                   show_rows, write_json)

BASE = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
VARIANTS = {  # the first one is what the others are compared with
    'convolution': {},
    'SASA backbone': dict(backbone='SASAResNet'),
    'SASA backbone, FPN, head': dict(
        backbone='SASAResNet', neck='SASAFPN', bbox_head='SASARetinaHead'),
    'SASA everywhere, with_cp': dict(
        backbone='SASAResNet', neck='SASAFPN', bbox_head='SASARetinaHead',
        attn_cfg=dict(with_cp=True)),
    'ACmix backbone': dict(backbone='ACmixResNet'),
    'ACmix backbone, FPN': dict(backbone='ACmixResNet', neck='ACmixFPN'),
}
INFERENCE, TRAINING = 'inference', 'training step'
BOXES = 8  # on every image
SMALL = 64  # side of the warm-up's image before memory is measured


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('configs', nargs='*', help='config files; the first '
                        'is what the others are compared with')
    parser.add_argument('--shape', type=int, nargs='+', default=[640],
                        metavar=('HEIGHT', 'WIDTH'),
                        help='image size in pixels; one number for a square '
                        '(default: 640)')
    parser.add_argument('--part', choices=('detector', 'backbone'),
                        default='detector', help='default: %(default)s')
    parser.add_argument('--training', choices=('yes', 'no', 'only'),
                        default='yes', help='inference and training steps, '
                        'or one of them (default: %(default)s)')
    add_options(parser, repeats=10, seconds=30)
    args = parser.parse_args()
    check_options(parser, args)
    if len(args.shape) > 2 or min(args.shape) < 1:
        parser.error('--shape must be one or two positive numbers, got '
                     f'{args.shape}')
    args.shape = (args.shape[0], args.shape[-1])
    for path in args.configs:
        if not osp.isfile(path):
            parser.error(f'configs must be files, got {path}')
        if args.configs.count(path) > 1:
            parser.error(f'configs must differ, got {path} twice')
    return parser, args


def load_configs(parser, args):
    """Name to config."""
    if not args.configs:
        return default_configs()
    stems = [Path(path).stem for path in args.configs]
    names = stems if len(set(stems)) == len(stems) else args.configs
    found = {
        name: Config.fromfile(path)
        for name, path in zip(names, args.configs)
    }
    for path, cfg in zip(args.configs, found.values()):
        if 'backbone' not in cfg.get('model', {}):
            parser.error('configs must hold a detector with a backbone, got '
                         f'{path}')
    return found


def default_configs():
    """One RetinaNet with other layers; all of its parts are trained."""
    base = get_config(BASE)
    base.model.backbone.update(frozen_stages=-1, norm_eval=False)
    found = {}
    for name, types in VARIANTS.items():
        found[name] = copy.deepcopy(base)
        types = dict(types)
        attn_cfg = types.pop('attn_cfg', None)
        for part, kind in types.items():
            found[name].model[part].type = kind
            if attn_cfg is not None:
                found[name].model[part].attn_cfg = dict(attn_cfg)
    return found


def make_run(cfg, training, part, shape, batch_size, device):
    """Callable that returns outputs, or the gradients of a training step."""
    from mmdet.testing import demo_mm_inputs
    torch.manual_seed(0)
    model = build_detector(cfg).to(device).train(training)
    data = demo_mm_inputs(batch_size, (3, *shape), [BOXES] * batch_size,
                          with_mask=model.with_mask, device=device)
    for sample in data['data_samples']:
        sample.gt_instances.labels.zero_()  # a class that all detectors have
    data = model.data_preprocessor(data, training)
    images, samples = data['inputs'], data['data_samples']

    def forward():
        if part == 'backbone':
            return model.backbone(images)
        return model(images, samples, mode='loss' if training else 'tensor')

    def infer():
        with torch.no_grad():
            return list(_tensors(forward()))

    def step():
        results = forward()
        if part == 'backbone':
            loss = sum(x.sum() for x in _tensors(results))
        else:
            loss, _ = model.parse_losses(results)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        return grads

    return step if training else infer


def _tensors(results):
    if isinstance(results, torch.Tensor):
        yield results
    elif isinstance(results, (tuple, list)):
        for x in results:
            yield from _tensors(x)


def prepare(cfg, training, part, shape, batch_size, device):
    """For ``peak_memory``: (warm-up, run)."""
    return tuple(
        make_run(cfg, training, part, size, batch_size, device)
        for size in ((SMALL, SMALL), shape))


def main():
    parser, args = parse_args()
    configs = load_configs(parser, args)
    found = environment(args.device)
    print(header(found))
    passes = {'yes': (INFERENCE, TRAINING), 'no': (INFERENCE, ),
              'only': (TRAINING, )}[args.training]
    fixed = args.part, args.shape, args.batch_size, args.device
    rows, notes = run_rows(
        make_run, prepare, {(name, title): (cfg, title == TRAINING, *fixed)
                            for name, cfg in configs.items()
                            for title in passes}, args)
    title = (f'{args.part}, {args.batch_size} x 3 x {args.shape[0]} x '
             f'{args.shape[1]}')
    print(f'\n{show_rows(title, rows, args.memory)}\n')
    for note in notes:
        print(f'- {note}')
    if not args.configs:
        print(f'RetinaNet-R50 ({BASE}), all stages and norms trained.')
    loss = '' if args.part == 'backbone' else ' loss,'
    print(f'Training step: forward,{loss} backward; ratio: to {rows[0].name}.'
          + (
              ' Peak: beyond model and images; extra: beyond outputs or '
              'gradients of the parameters too.' if args.memory else ''))
    if args.json is not None:
        write_json(args.json, found, args,
                   [dict(title=title, rows=as_dicts(rows), notes=notes)])


if __name__ == '__main__':
    main()

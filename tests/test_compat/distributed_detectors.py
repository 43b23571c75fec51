"""Small detectors of every kind; run by torchrun: two steps of DDP.

DDP with its defaults (no find_unused_parameters) refuses a second step where
a parameter had no gradient in the first one.
"""
import copy
import functools
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.dist import init_dist
from mmengine.model import MMDistributedDataParallel

from acmix_det.compat.cpu_training import end_gloo_process
from acmix_det.evaluation import build_detector
from mmdet.structures.mask import BitmapMasks  # isort: skip  needs mmcv.ops
from tests.test_models.test_detectors import batch

# a base of mmdet's takes half a second to read
read_config = functools.lru_cache(maxsize=None)(Config.fromfile)
CONFIGS = Path(__file__).parents[2] / 'configs'
BN = dict(type='BN', requires_grad=True)
# stage 1 stays convolution, so that it may be frozen
FROZEN = dict(norm_cfg=BN, norm_eval=True, frozen_stages=1)
# mmdet's Swin has a norm for each of its maps: the FPN has to take them all
SWIN = dict(type='ACmixSwinTransformer', embed_dims=16, depths=(1, 2, 1, 1),
            num_heads=(1, 2, 2, 2), out_indices=(1, 2, 3))
PVT = dict(type='ACmixPyramidVisionTransformer', embed_dims=8,
           num_layers=(1, 1, 1, 1), num_heads=(1, 2, 2, 2))
SAN = dict(depth=10, base_channels=32, norm_cfg=BN)


def digits(name, **backbone):
    """A RetinaNet of configs/digits with changes of its backbone."""
    cfg = copy.deepcopy(read_config(CONFIGS / f'digits/{name}_digits.py'))
    for key, value in backbone.items():
        cfg.model.backbone[key] = value  # update() would merge
    return cfg


def on_digits(widths, backbone):
    """The RetinaNet with ACmix in FPN and head on another backbone."""
    cfg = digits('retinanet-acmix_r18-acmix_fpn-acmix')
    cfg.model.backbone = dict(backbone)
    cfg.model.neck.update(in_channels=widths, start_level=len(widths) - 3)
    return cfg


def coco(name, **backbone):
    """A detector of configs/, an eighth of its width."""
    cfg = copy.deepcopy(read_config(CONFIGS / f'{name}_1x_coco.py'))

    def shrink(node):
        for key, value in node.items():
            if isinstance(value, dict):
                shrink(value)
            elif key in ('in_channels', 'out_channels', 'feat_channels',
                         'conv_out_channels', 'fc_out_channels',
                         'num_groups'):
                node[key] = (value // 8 if isinstance(value, int) else
                             [x // 8 for x in value])
            elif isinstance(value, list):
                for x in value:
                    if isinstance(x, dict):
                        shrink(x)

    shrink(cfg.model)
    cfg.model.backbone.update(init_cfg=None, **backbone)
    return cfg


def resnet(name):
    return coco(name, depth=26, base_channels=8, stem_channels=8)


KINDS = {
    'sasa': partial(digits, 'retinanet-sasa_r18-sasa_fpn-sasa'),
    'sasa stem': partial(digits, 'retinanet_r18-sasa_fpn-sasa', attn_stem={}),
    'sasa frozen': partial(digits, 'retinanet_r18-sasa_fpn-sasa', **FROZEN),
    'acmix': partial(digits, 'retinanet-acmix_r18-acmix_fpn-acmix'),
    'acmix frozen': partial(digits, 'retinanet_r18-acmix_fpn-acmix',
                            with_cp=True, **FROZEN),
    'swin': partial(on_digits, [32, 64, 128], SWIN),
    'swin frozen': partial(on_digits, [32, 64, 128],
                           dict(SWIN, frozen_stages=1, with_cp=True)),
    'pvt': partial(on_digits, [8, 16, 16, 16], PVT),
    'pvt with_cp': partial(on_digits, [8, 16, 16, 16],
                           dict(PVT, with_cp=True)),
    'plain san': partial(on_digits, [128, 256, 512, 1024], dict(SAN, type='SAN')),
    'acmix san': partial(on_digits, [128, 256, 512, 1024],
                         dict(SAN, type='ACmixSAN', with_cp=True)),
    'acmix san frozen': partial(
        on_digits, [128, 256, 512, 1024],
        dict(SAN, type='ACmixSAN', frozen_stages=1, norm_eval=True)),
    'atss': partial(resnet, 'sasa/atss_r50-sasa_fpn-sasa'),
    'faster r-cnn': partial(resnet, 'acmix/faster-rcnn_r50-acmix_fpn-acmix'),
    'mask r-cnn': partial(resnet, 'acmix/mask-rcnn_r50-acmix_fpn-acmix'),
    'cascade r-cnn': partial(
        coco, 'acmix/cascade-mask-rcnn_swin-t-acmix_fpn', embed_dims=12,
        depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2)),
}


def build(kind):
    """A detector in training mode."""
    return build_detector(KINDS[kind]()).train()


def total_loss(model, boxes):
    """Loss of two images with `boxes` boxes each, by a call of the model."""
    images, samples = batch([(64, 64)] * 2, boxes, num_classes=10)
    for sample in samples:
        sample.gt_instances.masks = BitmapMasks(
            np.ones((boxes, 64, 64), np.uint8), 64, 64)
    losses = model(images, samples, mode='loss')
    return sum(x if torch.is_tensor(x) else sum(x)
               for key, x in losses.items() if 'loss' in key)


def take_two_steps(kind):
    """Every process sees images with boxes and without, never both at once."""
    torch.manual_seed(0)
    wrapped = MMDistributedDataParallel(
        module=build(kind), device_ids=[dist.get_rank()])
    assert not wrapped.find_unused_parameters
    for step in range(2):
        wrapped.zero_grad()
        loss = total_loss(wrapped, boxes=2 * ((dist.get_rank() + step) % 2))
        loss.backward()
        assert loss.isfinite()


def main():
    init_dist('pytorch', backend='nccl')
    for kind in KINDS:
        take_two_steps(kind)
        print(f'{kind}: two steps', flush=True)


if __name__ == '__main__':
    main()
    end_gloo_process()

"""Detectors of shipped configs, made tiny."""
import copy
import functools
import tempfile
from pathlib import Path

import torch
from mmdet.models import PyramidVisionTransformer, ResNet, SwinTransformer
from mmdet.registry import MODELS
from mmengine.config import Config, ConfigDict
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DefaultScope

from acmix_det.models import SAN
from tests.test_models.test_detectors import batch

ROOT = Path(__file__).parents[2] / 'configs'
FOLDER = tempfile.TemporaryDirectory()
GN = dict(type='GN', num_groups=4, requires_grad=True)
SASA = dict(
    type='SASA', num_heads=2, attn_kernel_size=3, position='relative',
    use_key=True, value_init_std=None, padding_mode='mask', backend='auto',
    with_cp=False)
ACMIX = dict(
    type='ACmix', num_heads=2, attn_kernel_size=3, conv_kernel_size=3,
    num_shift_sets=1, padding_mode='reflect', backend='auto', with_cp=False)
STAGES = [True, False, False, True]
RESNET = dict(
    depth=18, base_channels=8, stem_channels=8, norm_cfg=GN,
    stage_with_attn=STAGES)
WIDTHS = [8, 16, 32, 64]
HEAD = dict(in_channels=8, feat_channels=8, stacked_convs=1, num_classes=3)


def neck(*widths, **kwargs):
    return dict(in_channels=list(widths), out_channels=8, **kwargs)


# config: what makes it tiny and writes out the arguments that it leaves to
# their defaults, and a host that has weights for its init_cfg
CASES = {
    'sasa/retinanet-sasa_r50-sasa-stem_fpn-sasa_8xb8-640-150e_coco': (dict(
        backbone=dict(RESNET, attn_cfg=SASA, attn_stem=dict(
            num_heads=2, num_mixtures=2, block_size=4)),
        neck=neck(*WIDTHS, attn_cfg=SASA),
        bbox_head=dict(HEAD, attn_cfg=SASA)), None),
    'digits/retinanet-acmix_r18-acmix_fpn-acmix_digits': (dict(
        backbone=dict(RESNET, attn_cfg=ACMIX),
        neck=neck(*WIDTHS, attn_cfg=ACMIX, norm_cfg=GN),
        bbox_head=dict(HEAD, conv_cfg=ACMIX, norm_cfg=GN)), None),
    'acmix/retinanet_r50-acmix-pretrained_fpn-acmix_1x_coco': (dict(
        backbone=dict(RESNET, attn_cfg=ACMIX, norm_cfg=dict(type='BN'),
                      init_cfg=dict(type='WarmStart', prefix=None)),
        neck=neck(*WIDTHS, attn_cfg=dict(num_heads=2)), bbox_head=HEAD),
        lambda: ResNet(18, base_channels=8, stem_channels=8)),
    'acmix/faster-rcnn_r50-acmix_fpn-acmix_1x_coco': (dict(
        backbone=dict(RESNET, attn_cfg=ACMIX),
        neck=neck(*WIDTHS, attn_cfg=ACMIX),
        rpn_head=dict(in_channels=8, feat_channels=8),
        roi_head=dict(
            bbox_roi_extractor=dict(out_channels=8),
            bbox_head=dict(in_channels=8, fc_out_channels=8,
                           num_classes=3)),
        train_cfg=dict(rpn_proposal=dict(max_per_img=20)),
        test_cfg=dict(rpn=dict(max_per_img=20))), None),
    'acmix/retinanet_swin-t-acmix_fpn_1x_coco': (dict(
        backbone=dict(
            embed_dims=8, depths=[1, 2, 1, 1], num_heads=[1, 2, 2, 4],
            window_size=3, strides=[4, 2, 2, 2], frozen_stages=-1),
        neck=neck(16, 32, 64), bbox_head=HEAD),
        lambda: SwinTransformer(
            embed_dims=8, depths=[1, 2, 1, 1], num_heads=[1, 2, 2, 4],
            window_size=3)),
    'acmix/retinanet_pvt-t-acmix_fpn_1x_coco': (dict(
        backbone=dict(
            embed_dims=8, num_stages=4, num_layers=[1, 1, 1, 1],
            num_heads=[1, 1, 2, 2], patch_sizes=[4, 2, 2, 2],
            strides=[4, 2, 2, 2], sr_ratios=[8, 4, 2, 1],
            mlp_ratios=[2, 2, 2, 2], out_indices=[0, 1, 2, 3],
            convert_weights=False, with_cp=False,
            attn_cfg=dict(conv_kernel_size=3, num_shift_sets=1)),
        neck=neck(8, 8, 16, 16), bbox_head=HEAD),
        lambda: PyramidVisionTransformer(
            embed_dims=8, num_layers=[1, 1, 1, 1], num_heads=[1, 1, 2, 2],
            mlp_ratios=[2, 2, 2, 2])),
    'acmix/retinanet_san10-acmix_fpn_1x_coco': (dict(
        backbone=dict(
            in_channels=3, base_channels=32, with_cp=False, frozen_stages=-1,
            attn_kernel_sizes=[3, 3, 3, 3, 3], out_indices=[0, 1, 2, 3],
            norm_cfg=dict(type='BN', requires_grad=True),
            init_cfg=dict(type='WarmStart'),
            attn_cfg=dict(share_planes=4, conv_kernel_size=3,
                          num_shift_sets=1)),
        neck=neck(128, 256, 512, 1024), bbox_head=HEAD),
        lambda: SAN(10, base_channels=32, attn_cfg=dict(share_planes=4),
                    attn_kernel_sizes=(3, 3, 3, 3, 3))),
}


@functools.lru_cache(maxsize=None)
def tiny_model(name):
    """The model of a config, with local weights if it starts from any."""
    changes, host = CASES[name]
    cfg = Config.fromfile(ROOT / f'{name}.py')
    cfg.merge_from_dict(dict(model=copy.deepcopy(changes)))
    if host is not None:
        path = Path(FOLDER.name, f'{name.split("/")[1]}.pth')
        torch.manual_seed(0)
        torch.save(dict(state_dict=host().state_dict()), path)
        cfg.model.backbone.init_cfg.checkpoint = str(path)
    return cfg.model.to_dict()


def build(model):
    """The detector of a model's config."""
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmdet'):
        return revert_sync_batchnorm(MODELS.build(ConfigDict(model)))


def run(model):
    """Build, initialise, train a step and predict; name the next stage."""
    yield 'build'
    detector = build(model)
    with DefaultScope.overwrite_default_scope('mmdet'):
        yield 'init_weights'
        detector.init_weights()
        detector.train()
        yield 'loss'
        losses = detector.loss(*batch([(64, 64), (50, 33)], num_classes=3))
        total = sum(x if torch.is_tensor(x) else sum(x)
                    for key, x in losses.items() if 'loss' in key)
        total.backward()
        yield 'predict'
        detector.eval()
        with torch.no_grad():
            detector.predict(*batch([(64, 64)]))

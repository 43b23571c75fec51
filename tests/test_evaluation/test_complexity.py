from pathlib import Path

import mmdet
import pytest
import torch
from mmengine.config import Config
from torch import nn

from acmix_det.evaluation import build_detector, count_complexity
from acmix_det.layers import StandAloneSelfAttention2d

ROOT = Path(__file__).parents[2]


def test_convolutions_are_counted():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 4, 1, bias=False))
    model.train()
    cost = count_complexity(model, (10, 7))
    positions = 5 * 4
    assert cost.macs == positions * (8 * 27 + 8 * 4)
    assert cost.flops == 2 * cost.macs
    assert cost.params == 8 * 27 + 8 + 16 + 32
    assert model.training and cost.parts['backbone'].macs == cost.macs


@pytest.mark.parametrize('backend', ['reference', 'torch', 'cpu'])
def test_attention_counts_the_same_with_every_backend(backend):
    layer = StandAloneSelfAttention2d(
        3, 16, 3, padding=1, num_heads=4, attn_kernel_size=7, position='none',
        backend=backend)
    cost = count_complexity(layer, (10, 10))
    # projections, q . k and attn . v
    assert cost.macs == 100 * (3 * 3 * 16 + 2 * 49 * 16)


def test_detector_of_a_config():
    cfg = Config.fromfile(ROOT / 'configs/digits/retinanet_r18_fpn_digits.py')
    model = build_detector(cfg)
    small, large = (count_complexity(model, (s, s)) for s in (64, 128))
    assert small.params == sum(p.numel() for p in model.parameters())
    assert large.macs == 4 * small.macs
    assert torch.is_grad_enabled()


def test_heads_of_two_stages_are_counted_by_the_test_settings():
    cfg = Config.fromfile(
        Path(mmdet.__file__).parent /
        '.mim/configs/mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py')
    parts = count_complexity(build_detector(cfg), (64, 64)).parts
    assert list(parts)[-3:] == ['neck', 'rpn_head', 'roi_head']
    boxes = 256 * 49 * 1024 + 1024 * 1024 + 1024 * (81 + 320)
    masks = 4 * 14 * 14 * 9 * 256 * 256 + 28 * 28 * (256 * 256 + 256 * 80)
    assert parts['roi_head'].macs == 1000 * boxes + 100 * masks


@pytest.mark.parametrize('size', [(0, 8), (8, )])
def test_wrong_size_is_named(size):
    with pytest.raises(ValueError, match='size must be .*got'):
        count_complexity(nn.Sequential(nn.Conv2d(3, 8, 3)), size)

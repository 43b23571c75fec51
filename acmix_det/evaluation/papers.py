"""Published costs, and the definitions that reproduce them."""
import copy
from typing import Callable, List, NamedTuple, Optional, Tuple, Union

import torch
from mmdet.models import ResNet
from mmdet.registry import MODELS
from mmengine.hub import get_config
from mmengine.registry import DefaultScope
from torch import nn

from acmix_det.layers import ACmix2d
from acmix_det.models import ACmixResNet, SASAResNet
from acmix_det.models.backbones import AttnResNet
from .complexity import count_complexity

IMAGENET_HEAD = (2048 * 1000 + 1000, 2048 * 1000)  # parameters, MACs


class Cell(NamedTuple):
    """One published figure and the computed one.

    Attributes:
        model (str): Row of the paper's table.
        quantity (str): 'params (M)', 'params', 'FLOPs (G)' (2 per
            multiply-add) or 'MACs (G)'.
        published (int | float): The paper's figure.
        computed (float): Ours.
        note (str): Why a difference is expected; such a cell is shown, not
            judged.
    """
    model: str
    quantity: str
    published: Union[int, float]
    computed: float
    note: str = ''

    @property
    def difference(self) -> float:
        return self.computed - self.published

    @property
    def fits(self) -> bool:
        """Whether the figure is reproduced, or its difference explained.

        Exact counts are exact. Rounded figures may differ by one unit of the
        last published place, since several do not round exactly.
        """
        if self.quantity == 'params':
            tolerance = 0
        else:
            tolerance = 1 if isinstance(self.published, int) else 0.1
        return bool(self.note) or abs(self.difference) <= tolerance + 1e-9


class _ConvResNet(ResNet):
    arch_settings = AttnResNet.arch_settings


STEM_NOTE = ('the FLOPs of the attention stem are not defined in the paper; '
             'counted is what runs')
HEAD_NOTE = ('every 3x3 convolution of FPN and head is attention of the same '
             'width, a predictor is attention and a pointwise convolution; '
             'the rest of the published figure is not explained by the text')


def _classifier(model: str, build: Callable[[], nn.Module],
                params: Optional[float], flops: Optional[float],
                quantity: str = 'FLOPs (G)', note: str = '') -> List[Cell]:
    """Cells of an ImageNet classifier at 224 x 224."""
    cost = count_complexity(build(), (224, 224), 'paper')
    cells = []
    if params is not None:
        total = cost.params + IMAGENET_HEAD[0]
        exact = isinstance(params, int)
        cells.append(
            Cell(model, 'params' if exact else 'params (M)', params,
                 total if exact else total / 1e6))
    if flops is not None:
        macs = cost.macs + IMAGENET_HEAD[1]
        factor = 2 if quantity == 'FLOPs (G)' else 1
        cells.append(Cell(model, quantity, flops, factor * macs / 1e9, note))
    return cells


def _sasa(depth: int = 50, **kwargs) -> Callable[[], nn.Module]:
    return lambda: SASAResNet(depth, **kwargs)


def _attn(**attn_cfg) -> Callable[[], nn.Module]:
    return lambda: SASAResNet(50, attn_cfg=attn_cfg)


def sasa_imagenet() -> List[Cell]:
    """Tables 1, 3, 4 and 5 and the stems of 1906.05909."""
    cells = []
    for depth, base, conv_stem, full in (
        (26, (13.7, 4.7), (10.3, 4.5), (10.3, 4.7)),
        (38, (19.6, 6.5), (14.1, 5.7), (14.1, 6.0)),
        (50, (25.6, 8.2), (18.0, 7.0), (18.0, 7.2))):
        cells += _classifier(f'ResNet-{depth}',
                             lambda d=depth: _ConvResNet(d), *base)
        cells += _classifier(f'SASA ResNet-{depth}, conv stem', _sasa(depth),
                             *conv_stem)
        cells += _classifier(f'SASA ResNet-{depth}, attention stem',
                             _sasa(depth, attn_stem={}), *full,
                             note=STEM_NOTE)
    cells += _classifier('SASA ResNet-50, conv stem, no positions',
                         _attn(position='none'), 18_012_200, None)
    cells += _classifier('SASA ResNet-50, conv stem, positions', _sasa(),
                         18_038_632, None)
    for groups, flops, params in (
        ('1', 7.3, 18.1), ('1-2', 7.5, 18.5), ('1-3', 8.0, 20.8),
        ('2-4', 7.9, 25.5), ('3-4', 7.8, 25.0), ('4', 7.2, 22.7)):
        first, _, last = groups.partition('-')
        stages = tuple(
            not int(first) <= i <= int(last or first) for i in range(1, 5))
        cells += _classifier(f'SASA ResNet-50, convolution in {groups}',
                             _sasa(stage_with_attn=stages), params, flops)
    for extent, flops in ((3, 6.6), (5, 6.7), (7, 7.0), (9, 7.3), (11, 7.7)):
        cells += _classifier(f'SASA ResNet-50, extent {extent}',
                             _attn(attn_kernel_size=extent), None, flops)
    cells += _classifier('SASA ResNet-50, q.r only', _attn(use_key=False),
                         16.7, 6.1)
    cells += _classifier('SASA ResNet-50, attention stem, plain values',
                         _sasa(attn_stem=dict(num_mixtures=1)), None, 7.1,
                         note=STEM_NOTE)
    return cells


def _retinanet(**types: str) -> nn.Module:
    """RetinaNet of 1906.05909: 90 classes, 6 anchors, P6 from P5."""
    model = get_config('mmdet::retinanet/retinanet_r50_fpn_1x_coco.py').model
    model.backbone.update(init_cfg=None, frozen_stages=-1)
    model.neck.update(
        add_extra_convs='on_output', relu_before_extra_convs=True)
    model.bbox_head.num_classes = 90
    model.bbox_head.anchor_generator.scales_per_octave = 2
    for part, name in types.items():
        model[part].type = name
    if 'bbox_head' in types:
        model.bbox_head.pop('conv_cfg', None)
    with DefaultScope.overwrite_default_scope('mmdet'):
        return MODELS.build(model)


def sasa_coco() -> List[Cell]:
    """Table 2 of 1906.05909, RetinaNet at 640 x 640."""
    backbone = dict(backbone='SASAResNet')
    everything = dict(
        backbone, neck='SASAFPN', bbox_head='SASARetinaHead')
    stem = dict(attn_stem={})
    cells = []
    for model, types, change, params, flops, note in (
        ('conv', {}, {}, 33.4, 182, ''),
        ('attention backbone, conv stem', backbone, {}, 25.9, 173, ''),
        ('attention backbone and stem', backbone, stem, 25.9, 173, STEM_NOTE),
        ('attention everywhere, conv stem', everything, {}, 22.0, 111,
         HEAD_NOTE),
        ('attention everywhere and stem', everything, stem, 22.0, 110,
         HEAD_NOTE)):
        detector = _retinanet(**types)
        if change:
            with DefaultScope.overwrite_default_scope('mmdet'):
                detector.backbone = MODELS.build(
                    dict(type='SASAResNet', depth=50, **change))
        cost = count_complexity(detector, (640, 640), 'paper')
        name = f'RetinaNet: {model}'
        cells += [
            Cell(name, 'params (M)', params, cost.params / 1e6,
                 note if note == HEAD_NOTE else ''),
            Cell(name, 'FLOPs (G)', flops, cost.flops / 1e9, note)
        ]
    return cells


def _more_shift_sets(model: nn.Module, size: Tuple[int, int]) -> int:
    """Multiply-adds of the second and further sets of shift kernels.

    What runs is their mean, composed with the fully connected layer into one
    convolution. Written out, as in the paper, every set is a convolution.
    """
    macs = 0

    def count(layer, _, out):
        nonlocal macs
        kernels = layer.shift_weight
        macs += (kernels[0].numel() * (len(kernels) - 1) *
                 out.shape[2] * out.shape[3])

    model = copy.deepcopy(model).to('meta')
    for module in model.modules():
        if isinstance(module, ACmix2d):
            module.register_forward_hook(count)
    model(torch.empty(1, 3, *size, device='meta'))
    return macs


def acmix_imagenet() -> List[Cell]:
    """ResNets of 2111.14556, and of the released code (exact)."""
    cells = []
    for depth, published, released in ((26, (10.6, 2.3), 10_487_816),
                                       (38, (14.6, 2.9), 14_410_896),
                                       (50, (18.6, 3.6), 18_333_976)):
        cells += _classifier(f'ACmix ResNet-{depth}, released code',
                             lambda d=depth: ACmixResNet(d), released, None)
        model = ACmixResNet(depth, attn_cfg=dict(num_shift_sets=2))
        name = f'ACmix ResNet-{depth}, two shift-kernel sets'
        params, macs = _classifier(name, lambda m=model: m, *published,
                                   quantity='MACs (G)')
        more = _more_shift_sets(model, (224, 224)) / 1e9
        cells += [params, macs._replace(computed=macs.computed + more)]
    return cells


def all_cells() -> List[Tuple[str, List[Cell]]]:
    """(title, cells) of every table."""
    return [('SASA, ImageNet at 224 x 224', sasa_imagenet()),
            ('SASA, RetinaNet on COCO at 640 x 640', sasa_coco()),
            ('ACmix, ImageNet at 224 x 224', acmix_imagenet())]

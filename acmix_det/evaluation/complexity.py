"""Parameters and multiply-adds of a detector."""
import copy
from typing import Dict, NamedTuple, Tuple

import torch
from mmdet.models.detectors import BaseDetector, TwoStageDetector
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import DefaultScope
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from acmix_det.ops.local_attention import flop_convention


class Complexity(NamedTuple):
    """Cost of one forward pass.

    Attributes:
        params (int): Number of parameters, frozen ones included.
        macs (int): Multiply-adds of convolutions, matrix products and local
            attention (q . k, q . r, attn . v). Norms, activations and sums
            count nothing.
        parts (dict[str, Complexity]): The same of each component: stem and
            stages of the backbone, neck, head.
    """
    params: int
    macs: int
    parts: Dict[str, 'Complexity'] = {}

    @property
    def flops(self) -> int:
        """2 per multiply-add."""
        return 2 * self.macs


def build_detector(cfg: Config) -> nn.Module:
    """Build the detector of a config without loading any weights."""
    model = copy.deepcopy(cfg.model)
    if 'backbone' in model:
        model.backbone.init_cfg = None
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope')):
        return MODELS.build(model)


class _Backbone(nn.Module):
    """A backbone alone, with a detector's name for it."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, x: Tensor) -> object:
        return self.backbone(x)


class _TwoStages(nn.Module):
    """A two-stage detector without the choice of proposals.

    Which boxes come out of the RPN is not known without weights, so the heads
    see as many as the test settings allow: ``rpn.max_per_img`` proposals for
    the boxes, ``rcnn.max_per_img`` detections for the masks.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        for name, child in detector.named_children():
            setattr(self, name, child)
        self.proposals = detector.test_cfg.rpn.max_per_img
        self.detections = detector.test_cfg.rcnn.max_per_img

    def forward(self, x: Tensor) -> None:
        x = self.backbone(x)
        if hasattr(self, 'neck'):
            x = self.neck(x)
        self.rpn_head(x)
        for part, count in (('bbox', self.proposals),
                            ('mask', self.detections)):
            heads = getattr(self.roi_head, f'{part}_head', None)
            if heads is None:
                continue
            extractors = getattr(self.roi_head, f'{part}_roi_extractor')
            if isinstance(heads, nn.ModuleList):
                # a mask comes from every stage of a cascade
                pairs = zip(heads, extractors)
            else:
                pairs = [(heads, extractors)]
            for head, extractor in pairs:
                size = extractor.roi_layers[0].output_size
                head(x[0].new_empty(count, extractor.out_channels, *size))


def _countable(model: nn.Module) -> nn.Module:
    if not isinstance(model, BaseDetector):
        return _Backbone(model)
    if isinstance(model, TwoStageDetector):
        return _TwoStages(model)
    return model


def count_complexity(model: nn.Module,
                     size: Tuple[int, int],
                     convention: str = 'executed') -> Complexity:
    """Count parameters and multiply-adds for one image.

    PyTorch's FLOP counter follows the forward pass on meta tensors, which
    have shapes only, so that any size takes a moment. Local attention
    registers its formula there, the same with every backend but
    'reference', which counts the products that it executes.

    Args:
        model (nn.Module): A one-stage detector (its tensor mode is counted),
            a two-stage one (its heads are counted for the largest number of
            proposals and detections of its test settings), or a backbone.
        size (tuple[int, int]): Height and width of the image in pixels.
        convention (str): How q . r counts, 'executed' or 'paper', see
            :func:`acmix_det.ops.flop_convention`. Defaults to 'executed'.

    Returns:
        Complexity: Of backbone, neck and head; box decoding is not counted.

    Raises:
        ValueError: If ``size`` is not a positive height and width, or there
            is no such convention.

    Example:
        >>> from mmengine.config import Config
        >>> from acmix_det.evaluation import build_detector, count_complexity
        >>> cfg = Config.fromfile('configs/digits/retinanet_r18_fpn_digits.py')
        >>> count_complexity(build_detector(cfg), (128, 128)).params
        999994
    """
    if len(size) != 2 or min(size) < 1:
        raise ValueError('size must be a positive height and width, got '
                         f'{size}')
    shapes = _countable(copy.deepcopy(model).to('meta'))
    shapes.eval()
    image = torch.empty(1, 3, *size, device='meta')
    options = dict(mode='tensor') if isinstance(shapes, BaseDetector) else {}
    with torch.no_grad(), flop_convention(convention), FlopCounterMode(
            display=False) as counter:
        shapes(image, **options)
    by_module = {
        name.partition('.')[2]: sum(flops.values())
        for name, flops in counter.get_flop_counts().items()
    }
    parts = {
        title: Complexity(
            sum(_count(shapes.get_submodule(n)) for n in names),
            sum(_flops(shapes, n, by_module) for n in names) // 2)
        for title, names in _components(shapes).items()
    }
    return Complexity(_count(shapes), counter.get_total_flops() // 2, parts)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _flops(model: nn.Module, name: str, by_module: Dict[str, int]) -> int:
    """FLOPs of a module, or of its children where its hooks were passed by.

    mmdet calls ``bbox_head.forward(x)``, which PyTorch's counter does not
    see.
    """
    if name in by_module:
        return by_module[name]
    return sum(
        _flops(model, f'{name}.{child}', by_module)
        for child, _ in model.get_submodule(name).named_children())


def _components(model: nn.Module) -> Dict[str, Tuple[str, ...]]:
    """Title to the modules of a component, in the order of the forward."""
    components = {}
    for name, child in model.named_children():
        stages = [
            n for n, _ in child.named_children() if n.startswith('layer')
        ] if name == 'backbone' else []
        if stages:
            components['stem'] = tuple(
                f'{name}.{n}' for n, _ in child.named_children()
                if n not in stages)
            components.update({n: (f'{name}.{n}', ) for n in stages})
        elif _count(child):
            components[name] = (name, )
    return components

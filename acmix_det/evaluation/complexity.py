"""Parameters and multiply-adds of a detector."""
import copy
from typing import NamedTuple, Tuple

import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import DefaultScope
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


class Complexity(NamedTuple):
    """Cost of one forward pass.

    Attributes:
        params (int): Number of parameters, frozen ones included.
        macs (int): Multiply-adds of convolutions, matrix products and local
            attention (q . k, the separable q . r, attn . v). Norms,
            activations and sums count nothing.
    """
    params: int
    macs: int

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


def count_complexity(model: nn.Module, size: Tuple[int, int]) -> Complexity:
    """Count parameters and multiply-adds for one image.

    PyTorch's FLOP counter runs the tensor mode of the detector; local
    attention registers its formula there, the same with every backend.

    Args:
        model (nn.Module): A detector with a tensor mode, such as RetinaNet.
        size (tuple[int, int]): Height and width of the image in pixels.

    Returns:
        Complexity: Of backbone, neck and head; box decoding is not counted.

    Raises:
        ValueError: If ``size`` is not a positive height and width.

    Example:
        >>> from mmengine.config import Config
        >>> from acmix_det.evaluation.complexity import (build_detector,
        ...                                              count_complexity)
        >>> cfg = Config.fromfile('configs/digits/retinanet_r18_fpn_digits.py')
        >>> count_complexity(build_detector(cfg), (128, 128)).params
        999994
    """
    if len(size) != 2 or min(size) < 1:
        raise ValueError('size must be a positive height and width, got '
                         f'{size}')
    training = model.training
    model.eval()
    image = torch.zeros(1, 3, *size, device=next(model.parameters()).device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image, mode='tensor')
    model.train(training)
    return Complexity(
        params=sum(p.numel() for p in model.parameters()),
        macs=counter.get_total_flops() // 2)

"""`mmcv._ext` without compiled ops: the ops that mmdet's RetinaNet, Faster and Mask R-CNN call.

The functions have the signatures of mmcv's C++ extension; results go to tensors that the caller has
allocated. Half types are computed in float32, as torchvision does under autocast.
"""
import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import mmcv
import torch
import torch.nn.functional as F
import torchvision

from .dependencies import COMPILED_MMCV, LITE_MMCV

EXT_NAME = 'mmcv._ext'


def provide_mmcv_ext():
    """Put the stand-in in place when, and only when, mmcv has no compiled ops.

    Raises:
        ImportError: There are compiled ops, but they do not import.
    """
    if sys.modules.get(EXT_NAME) is not None:
        return
    if importlib.util.find_spec(EXT_NAME) is None:
        mmcv._ext = sys.modules[EXT_NAME] = build_stand_in()
        return
    try:
        importlib.import_module(EXT_NAME)
    except Exception as error:
        raise ImportError(
            f'mmcv {mmcv.__version__} has compiled ops (mmcv._ext), but they do not import with '
            f'torch {torch.__version__} ({type(error).__name__}: {error}). They were most likely built '
            'for another torch. Build them again for this one:\n'
            f'    pip uninstall mmcv\n    {COMPILED_MMCV}\n'
            f'or do without them:\n    pip uninstall mmcv\n    {LITE_MMCV}', name=EXT_NAME) from error


def build_stand_in():
    """Build the module: real functions for the ops below, an explanation for every other op."""
    ext = ModuleType(EXT_NAME, __doc__)
    # Without a loader mmengine's mmcv_full_available() says False, which is the truth.
    ext.__spec__ = ModuleSpec(EXT_NAME, loader=None)
    for op in (nms, roi_align_forward, roi_align_backward, sigmoid_focal_loss_forward,
               sigmoid_focal_loss_backward):
        setattr(ext, op.__name__, op)
    ext.__getattr__ = _unavailable_op
    return ext


def _unavailable_op(name):
    if name.startswith('__'):
        raise AttributeError(f'module {EXT_NAME!r} has no attribute {name!r}')

    def unavailable(*args, **kwargs):
        raise _not_available(f'the mmcv op {name}')

    unavailable.__name__ = name
    return unavailable


def _not_available(what):
    return NotImplementedError(
        f'{what} needs compiled mmcv ops, and the installed mmcv {mmcv.__version__} has none. '
        f'Build them with:\n    pip uninstall mmcv-lite\n    {COMPILED_MMCV}')


def nms(boxes, scores, iou_threshold, offset):
    """Non-maximum suppression.

    Args:
        boxes (Tensor): x1, y1, x2, y2, shape (N, 4).
        scores (Tensor): Shape (N, ).
        iou_threshold (float): A box is dropped if its IoU with a kept box is larger.
        offset (int): Widths are x2 - x1 + offset, heights y2 - y1 + offset; 0 or 1.

    Returns:
        Tensor: Indices of the kept boxes by falling score, shape (K, ).
    """
    boxes = _at_least_float32(boxes)
    # x2 and y2 moved by the offset give exactly mmcv's areas and intersections.
    boxes = torch.cat([boxes[:, :2], boxes[:, 2:] + offset], dim=1)
    return torchvision.ops.nms(boxes, scores.to(boxes.dtype), iou_threshold)


def roi_align_forward(input, rois, output, argmax_y, argmax_x, aligned_height, aligned_width,
                      spatial_scale, sampling_ratio, pool_mode, aligned):
    """RoIAlign; fills `output`.

    Args:
        input (Tensor): Features, shape (B, C, H, W).
        rois (Tensor): Batch index, x1, y1, x2, y2, shape (K, 5).
        output (Tensor): Result, shape (K, C, aligned_height, aligned_width).
        argmax_y, argmax_x (Tensor): Used by maximum pooling only.
        aligned_height, aligned_width (int): Bins.
        spatial_scale (float): Features per pixel of the image.
        sampling_ratio (int): Samples per bin and direction, 0 for as many as the RoI covers.
        pool_mode (int): 1 for the average; 0, the maximum, is not available.
        aligned (bool): Whether to shift by half a pixel.

    Raises:
        NotImplementedError: `pool_mode` is the maximum.
    """
    _check_pool_mode(pool_mode)
    output.copy_(
        torchvision.ops.roi_align(
            _at_least_float32(input), _at_least_float32(rois), (aligned_height, aligned_width),
            spatial_scale, sampling_ratio, aligned))


def roi_align_backward(grad_output, rois, argmax_y, argmax_x, grad_input, aligned_height, aligned_width,
                       spatial_scale, sampling_ratio, pool_mode, aligned):
    """Gradient of `roi_align_forward`; fills `grad_input`, shape (B, C, H, W)."""
    _check_pool_mode(pool_mode)
    with torch.enable_grad():
        # The average is linear in the features, so their values do not matter for the gradient.
        features = _at_least_float32(torch.zeros_like(grad_input)).requires_grad_()
        pooled = torchvision.ops.roi_align(features, _at_least_float32(rois),
                                           (aligned_height, aligned_width), spatial_scale,
                                           sampling_ratio, aligned)
        grad, = torch.autograd.grad(pooled, features, grad_output.to(pooled.dtype))
    grad_input.copy_(grad)


def sigmoid_focal_loss_forward(input, target, weight, output, gamma, alpha):
    """Focal loss of each element; fills `output`. mmdet calls it on CUDA only.

    loss = -alpha (1 - p)^gamma log(p) where the class is the target, else
    -(1 - alpha) p^gamma log(1 - p); p = sigmoid(input).

    Args:
        input (Tensor): Logits, shape (N, C).
        target (Tensor): Class of each row, C for background, shape (N, ).
        weight (Tensor): Class weights; not available, must be empty.
        output (Tensor): Result, shape (N, C).
        gamma, alpha (float): See above.

    Raises:
        NotImplementedError: There are class weights.
    """
    _check_no_class_weight(weight)
    x = _at_least_float32(input)
    p = x.sigmoid()
    positive = -alpha * (1 - p)**gamma * F.logsigmoid(x)
    negative = -(1 - alpha) * p**gamma * F.logsigmoid(-x)
    output.copy_(torch.where(_is_target(input, target), positive, negative))


def sigmoid_focal_loss_backward(input, target, weight, grad_input, gamma, alpha):
    """Derivative of `sigmoid_focal_loss_forward`; fills `grad_input`, shape (N, C)."""
    _check_no_class_weight(weight)
    x = _at_least_float32(input)
    p = x.sigmoid()
    positive = -alpha * (1 - p)**gamma * (1 - p - gamma * p * F.logsigmoid(x))
    negative = -(1 - alpha) * p**gamma * (gamma * (1 - p) * F.logsigmoid(-x) - p)
    grad_input.copy_(torch.where(_is_target(input, target), positive, negative))


def _at_least_float32(tensor):
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _check_pool_mode(pool_mode):
    if pool_mode != 1:
        raise _not_available("roi_align with pool_mode='max'")


def _check_no_class_weight(weight):
    if weight.numel():
        raise _not_available('sigmoid_focal_loss with class weights')


def _is_target(input, target):
    return target[:, None] == torch.arange(input.size(1), device=input.device)

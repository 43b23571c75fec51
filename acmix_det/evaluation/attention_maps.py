"""What the attention of one position looks at."""
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import mmcv
import numpy as np
import torch
from mmdet.utils import get_test_pipeline_cfg
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import DefaultScope
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from acmix_det.layers import ACmix2d, AttentionConv2d


def attention_layers(model: nn.Module) -> Dict[str, AttentionConv2d]:
    """Name to layer of every SASA and ACmix layer, in the model's order."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, AttentionConv2d)
    }


class _Call(NamedTuple):
    """Arguments of the operation under a layer, as in its schema."""
    query: Tensor
    key: Optional[Tensor]
    value: Tensor
    rel_pos_h: Optional[Tensor]
    rel_pos_w: Optional[Tensor]
    kernel: int
    scale: float
    stride: int
    dilation: int
    padding_mode: str
    backend: str


class _Recorder(TorchDispatchMode):
    """Keeps the arguments of the local attention that runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: List[_Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.acmix_det.local_attention.default:
            self.calls.append(_Call(*args))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _record(layer: AttentionConv2d, x: Tensor) -> _Call:
    if not isinstance(layer, AttentionConv2d):
        raise TypeError('layer must be a SASA or ACmix layer, got '
                        f'{type(layer).__name__}')
    if x.dim() != 4 or len(x) != 1:
        raise ValueError('x must be a single map (1, C, H, W), got '
                         f'{tuple(x.shape)}')
    backend = layer.backend
    layer.backend = 'auto'  # 'reference' isn't an operator to record
    try:
        with _Recorder() as recorder:
            layer.forward(x)
    finally:
        layer.backend = backend
    call, = recorder.calls
    return call


def _neighbors(center: int, size: int, call: _Call) -> Tensor:
    """Indices of the k neighbors along one axis, -1 outside the map."""
    reach = call.kernel // 2
    index = center + call.dilation * torch.arange(-reach, reach + 1)
    if call.padding_mode == 'reflect':
        period = max(2 * size - 2, 1)
        index = index % period
        return torch.where(index < size, index, period - index)
    return torch.where((index >= 0) & (index < size), index, -1)


def _weights(call: _Call,
             position: Tuple[int, int]) -> Tuple[Tensor, Tensor, Tensor]:
    """Weights (N, k, k) of a query, rows (k,) and columns (k,) they are of."""
    size = tuple(call.query.shape[-2:])
    if not all(0 <= i < n and i % call.stride == 0
               for i, n in zip(position, size)):
        raise ValueError(
            'position must be the row and column of a query on a map of '
            f'{size[0]} x {size[1]}, multiples of {call.stride}, got '
            f'{tuple(position)}')
    rows, cols = (
        _neighbors(i, n, call).to(call.query.device)
        for i, n in zip(position, size))
    inside = (rows >= 0)[:, None] & (cols >= 0)  # (k, k)
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    query = call.query[0, :, :, position[0], position[1]].to(dtype)
    logits = query.new_zeros(len(query), *inside.shape)
    if call.key is not None:
        key = call.key[0][:, :, rows][..., cols].to(dtype) * inside
        logits = logits + torch.einsum('nd,ndyx->nyx', query, key)
    if call.rel_pos_h is not None:
        half = call.rel_pos_h.shape[1]
        along_h = torch.einsum('nd,ndy->ny', query[:, :half],
                               call.rel_pos_h.to(dtype))
        along_w = torch.einsum('nd,ndx->nx', query[:, half:],
                               call.rel_pos_w.to(dtype))
        logits = logits + along_h[:, :, None] + along_w[:, None]
    logits = call.scale * logits
    if call.padding_mode == 'mask':
        logits = logits.masked_fill(~inside, float('-inf'))
    return logits.flatten(1).softmax(1).view_as(logits), rows, cols


def attention_weights(layer: AttentionConv2d, x: Tensor,
                      position: Tuple[int, int]) -> Tensor:
    """Softmax weights of one query.

    A neighbor outside the map has a weight of zero with the border rule
    'mask', the weight of a zero key with 'zeros', and the weight of the pixel
    that it mirrors with 'reflect'. Average pooling behind the attention (SASA
    with a stride) is not part of it.

    Args:
        layer (AttentionConv2d): SASA or ACmix.
        x (Tensor): Input of the layer, (1, C, H, W).
        position (tuple[int, int]): Row and column in the map; multiples of
            the stride in ACmix, which computes no other query.

    Returns:
        Tensor: (num_heads, k, k), in float32 at least.

    Raises:
        TypeError: If ``layer`` is another one.
        ValueError: If ``x`` or ``position`` breaks the rules above.

    Example:
        >>> import torch
        >>> from acmix_det.evaluation.attention_maps import attention_weights
        >>> from acmix_det.layers import ACmix2d
        >>> layer = ACmix2d(8, 16, 3, padding=1)
        >>> attention_weights(layer, torch.rand(1, 8, 20, 30), (3, 5)).shape
        torch.Size([4, 7, 7])
    """
    return _weights(_record(layer, x), position)[0]


def attention_map(layer: AttentionConv2d, x: Tensor,
                  position: Tuple[int, int]) -> Tensor:
    """Softmax weights of one query, on the pixels that they come from.

    Weights of several neighbors that are the same pixel ('reflect') are
    summed, weights outside the map ('zeros') are left out.

    Args:
        layer (AttentionConv2d): See :func:`attention_weights`, as for all.

    Returns:
        Tensor: (num_heads, H, W), NaN outside the neighborhood.
    """
    call = _record(layer, x)
    weights, rows, cols = _weights(call, position)
    h, w = call.query.shape[-2:]
    inside = (rows >= 0)[:, None] & (cols >= 0)
    pixel = (rows[:, None] * w + cols)[inside]
    flat = weights.new_zeros(len(weights), h * w)
    flat.index_add_(1, pixel, weights[:, inside])
    outside = torch.ones(h * w, dtype=torch.bool, device=flat.device)
    outside[pixel] = False
    return flat.masked_fill(outside, float('nan')).view(-1, h, w)


class Grid(NamedTuple):
    """Where the pixels of a feature map lie in the original image.

    Pixel i of a map with stride s stands for the pixels s * i to
    s * (i + 1) - 1 of the network's input, which is the original image,
    resized and padded at the right and the bottom.

    Attributes:
        stride (int): Stride of the map.
        scale (tuple[float, float]): Resize factors of width and height.
        image_size (tuple[int, int]): Original height and width.
    """
    stride: int
    scale: Tuple[float, float]
    image_size: Tuple[int, int]

    def cell(self, x: int, y: int) -> Tuple[int, int]:
        """Row and column of the feature pixel over an original pixel.

        Raises:
            ValueError: If the pixel lies outside the image.
        """
        h, w = self.image_size
        if not (0 <= x < w and 0 <= y < h):
            raise ValueError(f'position must be 0 to {w - 1} (x) and 0 to '
                             f'{h - 1} (y), got {x} {y}')
        return (int((y + 0.5) * self.scale[1] / self.stride),
                int((x + 0.5) * self.scale[0] / self.stride))

    def box(self, rows: Tuple[int, int],
            cols: Tuple[int, int]) -> Tuple[float, float, float, float]:
        """Left, top, right, bottom of feature pixels, first to last.

        In original pixels, with 0 at the left edge of the first one.
        """
        across, down = (self.stride / s for s in self.scale)
        return (cols[0] * across, rows[0] * down, (cols[1] + 1) * across,
                (rows[1] + 1) * down)

    def shape(self) -> Tuple[int, int]:
        """Rows and columns of the map that the image covers."""
        row, col = self.cell(self.image_size[1] - 1, self.image_size[0] - 1)
        return row + 1, col + 1


class View(NamedTuple):
    """Attention of one position of an image.

    Attributes:
        name (str): Name of the layer.
        image (ndarray): Original image, RGB, (H, W, 3).
        position (tuple[int, int]): x and y in original pixels.
        query (tuple[int, int]): Row and column of the query in the map.
        maps (ndarray): See :func:`attention_map`.
        grid (Grid): Where the map lies.
    """
    name: str
    image: np.ndarray
    position: Tuple[int, int]
    query: Tuple[int, int]
    maps: np.ndarray
    grid: Grid

    def on_image(self) -> np.ndarray:
        """Sum of each head's weights that the image holds, (num_heads,).

        The rest lies on padding or outside the map.
        """
        rows, cols = self.grid.shape()
        return np.nansum(self.maps[:, :rows, :cols], (1, 2))

    def extent(self) -> Tuple[Tuple[int, int], Tuple[int, int]]:
        """First and last row, first and last column of the neighborhood."""
        rows, cols = np.nonzero(~np.isnan(self.maps[0]))
        return (rows.min(), rows.max()), (cols.min(), cols.max())


def read_image(path: str) -> np.ndarray:
    """Read an image file as RGB, (H, W, 3).

    Raises:
        ValueError: If it isn't one.
    """
    image = mmcv.imread(str(path))
    if image is None:
        raise ValueError(f'image must be an image file, got {path}')
    return image[:, :, ::-1]


@torch.no_grad()
def view_attention(model: nn.Module,
                   cfg: Config,
                   image: str,
                   name: str,
                   position: Tuple[int, int],
                   level: int = 0) -> View:
    """Run a detector on an image and look at one query of one layer.

    The image goes through the pipeline of ``cfg.test_dataloader``.

    Args:
        model (nn.Module): Detector.
        cfg (Config): Its config.
        image (str): Image file.
        name (str): Name of a SASA or ACmix layer in the model.
        position (tuple[int, int]): x and y in pixels of the file.
        level (int): Which map, for a layer that several go through (the
            towers of a one-stage head); 0 is the finest. Defaults to 0.

    Returns:
        View: What was seen.

    Raises:
        ValueError: If there is no such layer, level, image or position, or
            the layer sees something else than the whole image.
    """
    layers = attention_layers(model)
    if name not in layers:
        raise ValueError('layer must be one of '
                         f'{", ".join(layers) or "(there is none)"}, got '
                         f'{name!r}')
    original = read_image(image)
    with DefaultScope.overwrite_default_scope(
            cfg.get('default_scope', 'mmdet')):
        pipeline = Compose(get_test_pipeline_cfg(cfg))
    data = pipeline(dict(img_path=str(image), img_id=0))
    batch = model.data_preprocessor(
        {key: [value] for key, value in data.items()}, False)
    inputs, meta = batch['inputs'], batch['data_samples'][0].metainfo
    size = original.shape[:2]
    if tuple(meta['ori_shape']) != size or meta.get('flip') or (
            'scale_factor' not in meta and tuple(meta['img_shape']) != size):
        raise ValueError(
            'the test pipeline must load the image as it is in the file, '
            f'resize, pad, and pack scale_factor, got {meta}')

    seen = []
    layer = layers[name]
    handle = layer.register_forward_pre_hook(
        lambda _, args: seen.append(args[0]))
    try:
        model.eval()(**batch, mode='predict')
    finally:
        handle.remove()
    if not 0 <= level < len(seen):
        raise ValueError(f'level must be below {len(seen)}, as often as '
                         f'{name} runs on an image, got {level}')
    x = seen[level]
    grid = Grid(
        _stride(name, inputs.shape, x.shape),
        tuple(meta.get('scale_factor', (1., 1.))), size)
    step = layer.stride[0] if isinstance(layer, ACmix2d) else 1
    query = tuple(i // step * step for i in grid.cell(*position))
    maps = attention_map(layer, x, query).cpu().numpy()
    return View(name, original, tuple(position), query, maps, grid)


def _stride(name: str, image: Sequence[int], x: Sequence[int]) -> int:
    for stride in (2**i for i in range(12)):
        if x[0] == 1 and all(-(-n // stride) == m
                             for n, m in zip(image[2:], x[2:])):
            return stride
    raise ValueError(f'layer must see the whole image, but {name} sees '
                     f'{tuple(x)} of an input of {tuple(image)}')

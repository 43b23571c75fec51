"""Local attention in standard operators, for ONNX and ``torch.export``.

Same function as the other backends, without their tiles and in-place sums;
no size of the map is ever a constant, so that one exported graph serves every
height, width and batch.
"""
import importlib
from typing import List, Optional

import torch
import torch.nn.functional as F
from torch import Tensor


MIN_OPSET = 13
# where PyTorch keeps what the tracing exporter was called with
_EXPORTER_GLOBALS = ('torch.onnx._internal.torchscript_exporter._globals',
                     'torch.onnx._globals')


def is_exporting() -> bool:
    """Whether ``torch.export`` or an ONNX exporter reads the model.

    Both exporters take standard operators only. ``torch.compile`` does not
    count. Before PyTorch 2.7 this is not known inside
    ``torch.export.export(strict=True)``, whose programs then hold the
    operators of this package.
    """
    if torch.onnx.is_in_onnx_export():
        return True
    if hasattr(torch.compiler, 'is_exporting'):  # PyTorch 2.7
        return torch.compiler.is_exporting()
    return (torch.compiler.is_compiling()
            and not torch.compiler.is_dynamo_compiling())


def _check_opset() -> None:
    """Refuse an opset in which the operators do not exist."""
    if not (torch.jit.is_tracing() and torch.onnx.is_in_onnx_export()):
        return
    for name in _EXPORTER_GLOBALS:
        try:
            settings = importlib.import_module(name).GLOBALS
        except (ImportError, AttributeError):
            continue
        opset = getattr(settings, 'export_onnx_opset_version', MIN_OPSET)
        if opset < MIN_OPSET:
            raise ValueError(f'opset_version must be at least {MIN_OPSET} for '
                             f'local attention, got {opset}')
        return


def _bounced(size: int, reach: int, device: torch.device) -> Tensor:
    """Indices of an axis with mirrored borders, period ``2 * size - 2``."""
    # by tensors, since traces hold sizes as tensors
    inside = torch.arange(size, device=device)
    last = inside[-1:]
    indices = torch.arange(size + 2 * reach, device=device) - reach
    # at size 1 every index is 0, whatever the divisor
    indices = torch.remainder(indices, (2 * last).clamp(min=1))
    return last - (last - indices).abs()


def local_attention(query: Tensor, key: Optional[Tensor], value: Tensor,
                    rel_pos_h: Optional[Tensor], rel_pos_w: Optional[Tensor],
                    attn_kernel_size: int, scale: float, stride: int,
                    dilation: int, padding_mode: str) -> Tensor:
    """See :func:`acmix_det.ops.local_attention`; arguments are checked."""
    _check_opset()
    kernel, reach = attn_kernel_size, dilation * (attn_kernel_size // 2)
    h, w = query.shape[-2:]
    compute = torch.promote_types(query.dtype, torch.float32)
    q = query[..., ::stride, ::stride].to(compute) * scale

    def windows(x: Tensor, border: float = 0.) -> List[Tensor]:
        """Neighbors of all queries, (..., out_h, out_w, k) for each row."""
        if padding_mode == 'reflect':
            x = x.index_select(-2, _bounced(h, reach, x.device))
            x = x.index_select(-1, _bounced(w, reach, x.device))
        else:
            x = F.pad(x, (reach, ) * 4, value=border)
        # k copies along the row keep the graph small; k * k never exist
        x = torch.stack([
            x[..., dx * dilation:dx * dilation + w:stride]
            for dx in range(kernel)
        ], -1)
        return [
            x[..., dy * dilation:dy * dilation + h:stride, :, :]
            for dy in range(kernel)
        ]

    q_k = q.unsqueeze(-1)
    terms = []  # each a list by row of neighbors
    if key is not None:
        terms.append([(q_k * k).sum(2) for k in windows(key.to(compute))])
    if rel_pos_h is not None:
        half = rel_pos_h.shape[1]
        along_w = torch.einsum('bndhw,ndk->bnhwk', q[:, :, half:],
                               rel_pos_w.to(compute))
        rows = [along_w] * kernel
        if half:  # ONNX Runtime before 1.24 crashes on a sum over nothing
            along_h = torch.einsum('bndhw,ndk->kbnhw', q[:, :, :half],
                                   rel_pos_h.to(compute)).unsqueeze(-1)
            rows = [along_h[dy] + along_w for dy in range(kernel)]
        terms.append(rows)
    if padding_mode == 'mask':
        inside = torch.zeros_like(value[:1, :1, 0], dtype=compute)
        terms.append(windows(inside, border=float('-inf')))
    logits = torch.stack([sum(maps) for maps in zip(*terms)], -2)
    attn = logits.flatten(-2).softmax(-1).unflatten(-1, (kernel, kernel))
    out = sum((attn[:, :, None, ..., dy, :] * v).sum(-1)
              for dy, v in enumerate(windows(value.to(compute))))
    return out.to(query.dtype)

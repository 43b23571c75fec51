"""Errors of the backends of local attention on this machine."""
from typing import List, NamedTuple, Tuple

import torch

from acmix_det.ops import local_attention
from acmix_det.ops.local_attention import MODULES

# Error of the output or of a gradient, as a part of its largest value.
TOLERANCE = {
    torch.float32: 4e-5,
    torch.float16: 6e-3,
    torch.bfloat16: 4e-2,
}


class Case(NamedTuple):
    attn_kernel_size: int
    stride: int
    dilation: int
    padding_mode: str
    num_heads: int
    head_dim: int
    height: int
    width: int


CASES = (
    Case(3, 1, 1, 'mask', 1, 8, 13, 17),
    Case(3, 2, 1, 'zeros', 2, 5, 9, 11),
    Case(3, 1, 2, 'reflect', 4, 16, 12, 15),
    Case(5, 1, 1, 'reflect', 2, 32, 21, 19),
    Case(5, 3, 2, 'mask', 3, 3, 16, 13),
    Case(5, 2, 3, 'zeros', 1, 1, 7, 9),
    Case(7, 1, 1, 'mask', 8, 8, 25, 37),
    Case(7, 2, 1, 'reflect', 4, 32, 17, 33),
    Case(7, 1, 3, 'zeros', 2, 7, 20, 23),
    Case(7, 1, 1, 'reflect', 1, 64, 3, 5),
    Case(9, 1, 1, 'mask', 2, 12, 11, 31),
    Case(7, 1, 1, 'zeros', 2, 16, 1, 7),
)


class BackendError(NamedTuple):
    """Largest errors of one backend and type; nan where a result is nan."""
    backend: str
    dtype: str
    cases: int
    output: float
    gradients: float
    tolerance: float

    @property
    def right(self) -> bool:
        return (self.output <= self.tolerance
                and self.gradients <= self.tolerance)


def backend_errors(device: str) -> Tuple[List[BackendError], List[str]]:
    """Compare every backend that runs on a device with the reference.

    The reference computes in float64, on the CPU, from the same values.

    Args:
        device (str): Device of the backends.

    Returns:
        tuple[list[BackendError], list[str]]: The errors, and why other
        backends cannot run.
    """
    found, notes = [], []
    for backend, module in MODULES.items():
        if backend == 'reference':
            continue
        for dtype, tolerance in TOLERANCE.items():
            reason = module.can_use(
                torch.empty(1, 1, 1, 1, 1, dtype=dtype, device=device))
            if reason is not None:
                notes.append(f'{backend}: cannot run, {reason}')
                continue
            # compiled kernels take their time: half of the cases for these
            cases = CASES if dtype == torch.float32 else CASES[::2]
            errors = torch.tensor(
                [_errors(case, backend, dtype, device) for case in cases])
            found.append(
                BackendError(backend, str(dtype)[len('torch.'):], len(cases),
                             *errors.max(0).values.tolist(), tolerance))
    return found, list(dict.fromkeys(notes))


def _errors(case: Case, backend: str, dtype: torch.dtype,
            device: str) -> Tuple[float, float]:
    """Largest error of the output and of all gradients."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    k, stride, dilation, padding_mode, n, d, h, w = case
    inputs = [rand(2, n, d, h, w) for _ in range(3)]
    inputs += [rand(n, d // 2, k), rand(n, d - d // 2, k)]
    upstream = rand(2, n, d, -(-h // stride), -(-w // stride))

    def run(name, *to):
        leaves = [x.to(*to).requires_grad_() for x in inputs]
        query, key, value, rel_pos_h, rel_pos_w = leaves
        out = local_attention(
            query, key, value, k, rel_pos_h=rel_pos_h, rel_pos_w=rel_pos_w,
            scale=0.5, stride=stride, dilation=dilation,
            padding_mode=padding_mode, backend=name)
        grads = torch.autograd.grad(out, leaves, upstream.to(*to))
        # half of the channels of one are none
        return [x.detach().double().cpu() for x in (out, *grads) if x.numel()]

    output, *gradients = [
        (got - want).abs().max() / want.abs().max().clamp(min=1)
        for got, want in zip(
            run(backend, device), run('reference', torch.double))
    ]
    return output.item(), torch.stack(gradients).max().item()

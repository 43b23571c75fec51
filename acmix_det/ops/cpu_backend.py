"""Native local attention for CPUs, called through ctypes.

The library is built by ``setup.py`` (an optional extension; sources in
``csrc``) and knows nothing of PyTorch: a new PyTorch needs no rebuild. It
chooses its instruction set when it is loaded and computes half types in
float32.
"""
import ctypes
import importlib.machinery
import warnings
from pathlib import Path
from typing import List, Optional, Tuple

import torch
from torch import Tensor

_DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
}
_PADDING_MODES = dict(mask=0, zeros=1, reflect=2)


class _Tensor5(ctypes.Structure):
    _fields_ = [('data', ctypes.c_void_p), ('stride', ctypes.c_int64 * 5)]


class _Problem(ctypes.Structure):
    """Same order as in ``csrc/local_attention.h``."""
    _fields_ = [
        *((name, ctypes.c_int64)
          for name in ('batch', 'heads', 'head_dim', 'value_dim', 'height',
                       'width', 'kernel', 'stride', 'dilation',
                       'padding_mode', 'dtype')),
        ('scale', ctypes.c_double),
        *((name, _Tensor5) for name in ('query', 'key', 'value')),
        *((name, ctypes.c_void_p) for name in ('rel_pos_h', 'rel_pos_w')),
        *((name, _Tensor5)
          for name in ('out', 'grad_out', 'grad_query', 'grad_key',
                       'grad_value')),
        *((name, ctypes.c_void_p)
          for name in ('grad_rel_pos_h', 'grad_rel_pos_w')),
        ('num_threads', ctypes.c_int64),
        ('parallel', ctypes.c_void_p),
    ]


def _load() -> Tuple[Optional[ctypes.CDLL], Optional[str]]:
    """(library, None) or (None, why there is none)."""
    build = ('build it with "pip install --no-deps --force-reinstall '
             '." in the source folder, which needs a C++ compiler')
    paths = [
        Path(__file__).with_name('_local_attention' + suffix)
        for suffix in importlib.machinery.EXTENSION_SUFFIXES
    ]
    path = next((p for p in paths if p.exists()), None)
    if path is None:
        return None, f'its extension has not been built; {build}'
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f'its extension does not load ({error}); {build}'
    library.acmix_det_problem_size.restype = ctypes.c_int64
    library.acmix_det_capability.restype = ctypes.c_char_p
    library.acmix_det_set_capability.argtypes = [ctypes.c_char_p]
    for name in ('forward', 'backward'):
        getattr(library, f'acmix_det_{name}').argtypes = [
            ctypes.POINTER(_Problem)
        ]
    if library.acmix_det_problem_size() != ctypes.sizeof(_Problem):
        return None, f'its extension is of another version; {build}'
    return library, None


# At import, so that torch.compile sees constants.
_LIBRARY, _UNAVAILABLE = _load()


def _checked_library() -> ctypes.CDLL:
    if _LIBRARY is None:
        raise RuntimeError(f"backend='cpu' cannot run: {_UNAVAILABLE}")
    return _LIBRARY


def can_use(query: Tensor) -> Optional[str]:
    """Return why this backend cannot run, None if it can."""
    if query.device.type != 'cpu':
        return f'it needs tensors on the CPU, got {query.device}'
    if query.dtype not in _DTYPES:
        return f'it does not know the type {query.dtype}'
    return _UNAVAILABLE


def warn_if_not_built() -> None:
    """Warn, once, where the package has been installed without a compiler."""
    if _UNAVAILABLE is not None:
        warnings.warn("backend='cpu' of local attention cannot run: "
                      f"{_UNAVAILABLE}. backend='torch' is used instead on "
                      'CPUs, with the same results, several times slower.')


def capability() -> str:
    """Instruction set of the kernels: 'avx512', 'avx2' or 'baseline'."""
    return _checked_library().acmix_det_capability().decode()


def set_capability(name: str) -> None:
    """Use the kernels of another instruction set that this processor has."""
    if _checked_library().acmix_det_set_capability(name.encode()):
        raise ValueError(f'name must be an instruction set of this processor '
                         f'(avx512, avx2, baseline), got {name!r}')


def _openmp_parallel() -> Optional[int]:
    """Address of GOMP_parallel in the OpenMP runtime of this process.

    PyTorch loads its runtime for all to see. With its threads there is one
    pool, not two that get in each other's way.
    """
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


_PARALLEL = _openmp_parallel()


def _tensor(x: Optional[Tensor]) -> _Tensor5:
    if x is None:
        return _Tensor5()
    return _Tensor5(x.data_ptr(), (ctypes.c_int64 * 5)(*x.stride()))


def _problem(query, key, value, rel_pos_h, rel_pos_w, attn_kernel_size, scale,
             stride, dilation, padding_mode) -> _Problem:
    b, n, d, h, w = query.shape
    return _Problem(
        batch=b, heads=n, head_dim=d, value_dim=value.shape[2], height=h,
        width=w, kernel=attn_kernel_size, stride=stride, dilation=dilation,
        padding_mode=_PADDING_MODES[padding_mode], dtype=_DTYPES[query.dtype],
        scale=scale, query=_tensor(query), key=_tensor(key),
        value=_tensor(value),
        rel_pos_h=None if rel_pos_h is None else rel_pos_h.data_ptr(),
        rel_pos_w=None if rel_pos_w is None else rel_pos_w.data_ptr(),
        num_threads=torch.get_num_threads(), parallel=_PARALLEL)


def _call(name: str, problem: _Problem) -> None:
    if getattr(_checked_library(), f'acmix_det_{name}')(ctypes.byref(problem)):
        raise MemoryError(f'no memory for local attention ({name})')


def _compute_type(x: Optional[Tensor]) -> Optional[Tensor]:
    if x is None:
        return None
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def local_attention(query: Tensor, key: Optional[Tensor], value: Tensor,
                    rel_pos_h: Optional[Tensor], rel_pos_w: Optional[Tensor],
                    attn_kernel_size: int, scale: float, stride: int,
                    dilation: int, padding_mode: str) -> Tensor:
    """See :func:`acmix_det.ops.local_attention`; arguments are checked."""
    h, w = query.shape[-2:]
    out = value.new_empty(*value.shape[:3], -(-h // stride), -(-w // stride))
    # kept alive until the call returns
    rel_pos = _compute_type(rel_pos_h), _compute_type(rel_pos_w)
    problem = _problem(query, key, value, *rel_pos, attn_kernel_size, scale,
                       stride, dilation, padding_mode)
    problem.out = _tensor(out)
    _call('forward', problem)
    return out


def local_attention_backward(
        grad: Tensor, query: Tensor, key: Optional[Tensor], value: Tensor,
        rel_pos_h: Optional[Tensor], rel_pos_w: Optional[Tensor],
        attn_kernel_size: int, scale: float, stride: int, dilation: int,
        padding_mode: str) -> List[Optional[Tensor]]:
    """Gradients of query, key, value, rel_pos_h and rel_pos_w.

    Those of arguments that are None are None.
    """
    rel_pos = _compute_type(rel_pos_h), _compute_type(rel_pos_w)
    compute = torch.promote_types(query.dtype, torch.float32)
    grads = [
        None if x is None else torch.zeros(x.shape, dtype=compute)
        for x in (query, key, value, rel_pos_h, rel_pos_w)
    ]
    problem = _problem(query, key, value, *rel_pos, attn_kernel_size, scale,
                       stride, dilation, padding_mode)
    problem.grad_out = _tensor(grad)
    problem.grad_query, problem.grad_key, problem.grad_value = map(
        _tensor, grads[:3])
    if rel_pos_h is not None:
        problem.grad_rel_pos_h = grads[3].data_ptr()
        problem.grad_rel_pos_w = grads[4].data_ptr()
    _call('backward', problem)
    return [None if x is None else x.to(query.dtype) for x in grads]

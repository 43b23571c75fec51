"""The Triton backend: numerics, compilation, and doing without."""
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from acmix_det.ops import triton_backend
from acmix_det.ops.local_attention import _pick_backend

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).with_name('triton_cases.py')

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec('triton') is None,
    reason='triton is not installed')


def all_cases_pass(**env):
    """Whether the numerical cases pass in a fresh process, none skipped."""
    result = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider',
         str(CASES)], cwd=ROOT, env=dict(os.environ, **env),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout
    summary = result.stdout.splitlines()[-1]
    # none skipped, and not a handful
    return re.match(r'\d\d+ passed(, \d+ warnings?)? in ', summary)


@needs_triton
@pytest.mark.slow
def test_kernels_match_reference_in_the_interpreter():
    assert all_cases_pass(TRITON_INTERPRET='1', OMP_NUM_THREADS='1')


@needs_triton
@pytest.mark.gpu
def test_kernels_match_reference_on_a_gpu():
    assert all_cases_pass(TRITON_INTERPRET='0')


def compile_kernel(kernel, arguments, capability):
    """Compile a launch for a GPU that need not be there."""
    from triton.backends import compiler as backend
    from triton.compiler import ASTSource, compile
    pointers = {
        torch.float32: '*fp32',
        torch.float16: '*fp16',
        torch.bfloat16: '*bf16',
    }
    options = {
        name: arguments.pop(name) for name in ('num_warps', 'num_stages')
    }
    signature, constants, hints = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments.pop(parameter.name)
        # as the launcher does: None and the int 1 are constants
        if parameter.is_constexpr or value is None or (isinstance(
                value, int) and value == 1):
            signature[parameter.name] = 'constexpr'
            constants[parameter.name] = value
        elif isinstance(value, float):
            signature[parameter.name] = 'fp32'
        else:
            is_tensor = isinstance(value, torch.Tensor)
            signature[parameter.name] = (
                pointers[value.dtype] if is_tensor else 'i32')
            if is_tensor or value % 16 == 0:
                hints[(i, )] = [['tt.divisibility', 16]]
    assert not arguments, arguments
    if hasattr(backend, 'AttrsDescriptor'):  # Triton 3.2
        signature = {k: v for k, v in signature.items() if k not in constants}
        hints = backend.AttrsDescriptor.from_hints({i: 16 for i, in hints})
    return compile(
        ASTSource(kernel, signature, constants, hints),
        target=backend.GPUTarget('cuda', capability, 32), options=options)


@needs_triton
@pytest.mark.parametrize('capability, dtype, shape, options', [
    (80, torch.float32, (2, 2, 256, 9, 16), (7, 0.5, 1, 1, 'mask')),
    (90, torch.bfloat16, (2, 2, 33, 9, 16), (3, 0.5, 2, 3, 'reflect')),
    (90, torch.float16, (1, 1, 1, 1, 1), (1, 0.5, 1, 2, 'zeros')),
], ids=['wide', 'strided', 'all-ones'])
def test_kernels_compile_within_shared_memory(capability, dtype, shape,
                                              options, monkeypatch, tmp_path):
    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))
    launches = []
    monkeypatch.setattr(
        triton_backend._Plan, '_launch',
        lambda self, kernel, programs, **arguments: launches.append(
            (kernel, {**self.arguments, **arguments})))
    n, d = shape[1:3]
    x = torch.zeros(shape, dtype=dtype)
    rel_pos = [
        torch.zeros(n, size, options[0], dtype=dtype)
        for size in (d // 2, d - d // 2)
    ]
    tensors = (x, None if d == 1 else x, x, *rel_pos)
    out = triton_backend.local_attention(*tensors, *options)
    triton_backend.local_attention_backward(out, *tensors, *options)
    assert [a.get('PASS') for _, a in launches] == [
        'forward', 'statistics', 'gradient', None]
    for kernel, arguments in launches:
        compiled = compile_kernel(kernel, arguments, capability)
        assert compiled.asm['cubin']
        assert 0 < compiled.metadata.shared <= 99 * 1024


@pytest.mark.parametrize('dtype, channels, message', [
    (torch.float64, 4, 'float16 and bfloat16, got torch.float64'),
    (torch.float32, 257, 'at most 256 channels per head, got 257'),
    (torch.float32, 4, 'it needs tensors on a CUDA device, got cpu'),
], ids=['dtype', 'width', 'device'])
@needs_triton
def test_can_use_says_why_not(dtype, channels, message):
    reason = triton_backend.can_use(torch.empty(1, 1, channels, 2, 2,
                                                dtype=dtype))
    assert message in reason


def test_missing_triton_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, 'triton', None)
    reason = triton_backend.can_use(torch.empty(1, 1, 4, 2, 2))
    assert reason == ('it needs the package triton; install it with '
                      '"pip install triton"')


@needs_triton
def test_broken_triton_is_a_reason_with_its_error(monkeypatch):

    def kernels():
        raise OSError('libtriton.so: bad magic')

    monkeypatch.setattr(triton_backend, '_kernels', kernels)
    reason = triton_backend.can_use(torch.empty(1, 1, 4, 2, 2))
    assert '(OSError: libtriton.so: bad magic)' in reason


@needs_triton
@pytest.mark.parametrize('capability, reason', [
    ((7, 5), 'it needs a device of compute capability 8.0 or above, got 7.5'),
    ((8, 0), None),
    ((12, 0), None),
], ids=['7.5', '8.0', '12.0'])
def test_old_devices_are_refused(monkeypatch, capability, reason):
    monkeypatch.setattr(torch.cuda, 'get_device_capability',
                        lambda device: capability)
    assert triton_backend._cannot_run(torch.device('cuda', 0)) == reason


class OnCuda:
    """What the choice of a backend looks at."""
    device = torch.device('cuda', 0)
    dtype = torch.float32
    shape = (1, 1, 4, 2, 2)


@pytest.mark.parametrize('reason, backend', [(None, 'triton'),
                                             ('too old', 'torch')])
def test_auto_takes_triton_on_cuda_where_it_can_run(monkeypatch, reason,
                                                    backend):
    monkeypatch.setattr(triton_backend, '_cannot_run', lambda device: reason)
    assert _pick_backend('auto', OnCuda) == backend


@needs_triton
def test_broken_triton_is_an_error_on_cuda_not_a_slow_path(monkeypatch):

    def kernels():
        raise OSError('libtriton.so: bad magic')

    monkeypatch.setattr(triton_backend, '_kernels', kernels)
    with pytest.raises(RuntimeError, match="bad magic.*or ask for backend"):
        _pick_backend('auto', OnCuda)
    with pytest.raises(RuntimeError, match="backend='triton' cannot run: "):
        _pick_backend('triton', OnCuda)
    assert _pick_backend('torch', OnCuda) == 'torch'


def test_can_use_does_not_break_a_compiled_graph():

    @torch.compile(backend='aot_eager', fullgraph=True)
    def function(x):
        return x.sin() if triton_backend.can_use(x) is None else x.cos()

    x = torch.rand(1, 1, 4, 2, 2)
    assert torch.equal(function(x), x.cos())


def test_triton_is_not_imported_with_the_package():
    # others may import it, hence a process that has none
    code = ('import sys; sys.modules["triton"] = None; import acmix_det; '
            'import acmix_det.ops.triton_backend; '
            'print("acmix_det.ops._triton_kernels" in sys.modules)')
    out = subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True,
                         capture_output=True, text=True).stdout
    assert out.splitlines()[-1] == 'False'

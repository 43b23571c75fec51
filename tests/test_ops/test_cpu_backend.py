"""The native backend: instruction sets, threads, memory, and doing without."""
import ctypes
import subprocess
import sys

import pytest
import torch

from acmix_det.ops import cpu_backend, local_attention, reference
from tests.test_ops.test_local_attention import (ARGUMENTS, assert_same,
                                                 make_inputs, run)

CAPABILITIES = ('avx512', 'avx2', 'baseline')


@pytest.fixture(params=CAPABILITIES)
def capability(request):
    before = cpu_backend.capability()
    try:
        cpu_backend.set_capability(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    cpu_backend.set_capability(before)


@pytest.mark.parametrize('padding_mode', ['mask', 'zeros', 'reflect'])
@pytest.mark.parametrize('dtype', [
    torch.float64, torch.float32, torch.float16, torch.bfloat16
], ids=str)
# wider than a vector, more rows than a task, more channels than a step
@pytest.mark.parametrize('sizes, options', [
    (dict(h=3, w=70, d=11, dv=13), dict()),
    (dict(h=45, w=17, d=2), dict()),
    (dict(h=70, w=9, d=3), dict(stride=2, dilation=3)),
    (dict(h=37, w=35, d=1), dict(stride=3)),
], ids=['wide', 'high', 'stride2-dilation3', 'stride3'])
def test_every_instruction_set_matches_reference(capability, sizes, options,
                                                 dtype, padding_mode):
    assert cpu_backend.capability() == capability
    inputs = make_inputs(b=1, k=7, dtype=dtype, **sizes)
    options = dict(options, padding_mode=padding_mode, scale=0.5)
    exact = {name: x.detach().double() for name, x in inputs.items()}
    assert_same(
        run(inputs, 7, 'cpu', **options),
        run(exact, 7, 'reference', **options), dtype)


@pytest.mark.parametrize('k', [9, 11, 15])
def test_wide_neighborhoods_match_reference(capability, k):
    inputs = make_inputs(b=1, h=9, w=20, k=k)
    assert_same(run(inputs, k, 'cpu'), run(inputs, k, 'reference'))


def test_unknown_instruction_set_is_named():
    with pytest.raises(ValueError, match="name must be .* got 'avx1024'"):
        cpu_backend.set_capability('avx1024')


@pytest.mark.parametrize('padding_mode', ['mask', 'reflect'])
def test_result_does_not_depend_on_the_number_of_threads(padding_mode):
    inputs = make_inputs(b=2, n=3, h=40, w=21, k=7, dtype=torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            results.append(run(inputs, 7, 'cpu', padding_mode=padding_mode))
    finally:
        torch.set_num_threads(before)
    for out, grads in results[1:]:
        assert torch.equal(out, results[0][0])
        for name, grad in grads.items():
            assert torch.equal(grad, results[0][1][name]), name


def test_threads_of_its_own_give_the_same_result(monkeypatch):
    inputs = make_inputs(b=2, h=40, w=21, k=7)
    expected = run(inputs, 7, 'cpu')
    assert cpu_backend._PARALLEL is not None
    monkeypatch.setattr(cpu_backend, '_PARALLEL', None)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        out, grads = run(inputs, 7, 'cpu')
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, expected[0])
    for name, grad in grads.items():
        assert torch.equal(grad, expected[1][name]), name


@pytest.mark.parametrize('options', [
    dict(), dict(stride=2), dict(padding_mode='reflect', dilation=2)
], ids=str)
def test_every_element_is_written(options, monkeypatch):
    """The output buffer starts as NaN; so do the margins of the inputs."""
    inputs = make_inputs(h=21, w=19, d=5, dv=7, k=5)

    def poisoned(self, *shape):
        return torch.full(shape, float('nan'), dtype=self.dtype)

    monkeypatch.setattr(torch.Tensor, 'new_empty', poisoned)
    views = {}
    for name in ('query', 'key', 'value'):
        x = inputs[name].detach()
        frame = torch.full([s + 4 for s in x.shape], float('nan'),
                           dtype=x.dtype)
        inner = tuple(slice(2, 2 + s) for s in x.shape)
        frame[inner] = x
        views[name] = frame[inner]
    args = {**dict(stride=1, dilation=1, padding_mode='mask'), **options}
    tensors = [views.get(name, inputs[name].detach()) for name in ARGUMENTS]
    out = cpu_backend.local_attention(*tensors, 5, 1., *args.values())
    assert torch.isfinite(out).all()
    expected = reference.local_attention(
        *(inputs[name].detach() for name in ARGUMENTS), 5, 1., *args.values())
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_nan_stays_inside_its_neighborhood():
    inputs = make_inputs(b=1, h=40, w=40, k=3, dtype=torch.float32)
    value = inputs['value'].detach().clone()
    value[0, 0, :, 20, 20] = float('nan')
    out, _ = run(dict(inputs, value=value), 3, 'cpu')
    found = out[0, 0, 0].isnan().nonzero()
    assert found.min(0).values.tolist() == [19, 19]
    assert found.max(0).values.tolist() == [21, 21] and len(found) == 9


def test_broadcast_inputs_are_read_in_place():
    inputs = make_inputs(k=3)
    one = torch.randn(1, 1, 4, 1, 1, dtype=torch.float64)
    for name in ('key', 'value'):
        inputs[name] = one.expand(2, 2, 4, 6, 7)
    assert_same(run(inputs, 3, 'cpu'), run(inputs, 3, 'reference'))


def test_other_devices_are_refused_with_the_reason():
    class OnCuda:
        device, dtype = torch.device('cuda:0'), torch.float32

    assert cpu_backend.can_use(OnCuda) == (
        'it needs tensors on the CPU, got cuda:0')


def test_refusal_is_the_error_of_a_backend_asked_for_by_name(monkeypatch):
    monkeypatch.setattr(cpu_backend, '_UNAVAILABLE', 'no luck today')
    x = torch.rand(1, 2, 4, 9, 7)
    with pytest.raises(RuntimeError,
                       match="backend='cpu' cannot run: no luck today"):
        local_attention(x, x, x, 3, backend='cpu')
    assert local_attention(x, x, x, 3).shape == x.shape


def _without_extension(code):
    """Run code in a process that does not find the extension."""
    hide = (
        'from pathlib import Path\n'
        'exists = Path.exists\n'
        'Path.exists = lambda path, **kwargs: exists(path, **kwargs) and not '
        "path.name.startswith('_local_attention')\n")
    return subprocess.run([sys.executable, '-c', hide + code],
                          capture_output=True, text=True, check=True)


def test_without_the_extension_there_is_one_warning_and_the_same_result():
    done = _without_extension('''
import torch
import acmix_det
from acmix_det.ops import local_attention
x = torch.rand(1, 2, 4, 9, 7, dtype=torch.float64, requires_grad=True)
for _ in range(3):
    out = local_attention(x, x, x, 3)
expected = local_attention(x, x, x, 3, backend='reference')
torch.testing.assert_close(out, expected)
grads = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (out, expected)]
torch.testing.assert_close(*grads)
try:
    local_attention(x, x, x, 3, backend='cpu')
except RuntimeError as error:
    print(error)
''')
    assert done.stderr.count('UserWarning') == 1
    assert "'torch' is used instead" in done.stderr
    for text in (done.stdout, done.stderr):
        assert 'its extension has not been built; build it with' in text
        assert 'C++ compiler' in text


def test_extension_of_another_version_is_not_called(monkeypatch):
    class Function:
        def __call__(self):
            return ctypes.sizeof(cpu_backend._Problem) + 8

    library = type('Library', (), dict(
        acmix_det_problem_size=Function(), acmix_det_capability=Function(),
        acmix_det_set_capability=Function(), acmix_det_forward=Function(),
        acmix_det_backward=Function()))()
    monkeypatch.setattr(ctypes, 'CDLL', lambda path: library)
    found, reason = cpu_backend._load()
    assert found is None and 'is of another version; build it' in reason


def test_extension_that_does_not_load_says_why(monkeypatch):
    def fail(path):
        raise OSError('invalid ELF header')

    monkeypatch.setattr(ctypes, 'CDLL', fail)
    found, reason = cpu_backend._load()
    assert found is None
    assert 'does not load (invalid ELF header); build it' in reason


def test_auto_takes_the_native_backend(monkeypatch):
    called = []
    native = cpu_backend.local_attention
    monkeypatch.setattr(
        cpu_backend, 'local_attention',
        lambda *args: called.append(1) or native(*args))
    x = torch.rand(1, 2, 4, 9, 7)
    local_attention(x, x, x, 3)
    assert called == [1]

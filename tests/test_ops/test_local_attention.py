"""local_attention: the definition, the fixtures, and every backend on it."""
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from acmix_det.ops import local_attention, torch_backend

DATA = Path(__file__).parents[1] / 'data'
FAST_BACKENDS = ('torch', 'cpu')
BACKENDS = ('reference', *FAST_BACKENDS)
PADDING_MODES = ('mask', 'zeros', 'reflect')
TOLERANCE = {  # rtol, atol against the reference in float64
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2e-5, 2e-5),
    torch.float16: (2e-3, 4e-3),
    torch.bfloat16: (1e-2, 3e-2),
}
ARGUMENTS = ('query', 'key', 'value', 'rel_pos_h', 'rel_pos_w')


def make_inputs(b=2, n=2, d=4, dv=None, h=6, w=7, k=3, dtype=torch.float64,
                seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    return dict(
        query=rand(b, n, d, h, w),
        key=rand(b, n, d, h, w),
        value=rand(b, n, dv or d, h, w),
        rel_pos_h=rand(n, d // 2, k),
        rel_pos_w=rand(n, d - d // 2, k))


def run(inputs, k, backend, **options):
    """Output and the gradients of the inputs that are given, by name."""
    leaves = {
        name: x.detach().requires_grad_()
        for name, x in inputs.items() if x is not None
    }
    out = local_attention(
        leaves['query'], leaves.get('key'), leaves['value'], k,
        rel_pos_h=leaves.get('rel_pos_h'), rel_pos_w=leaves.get('rel_pos_w'),
        backend=backend, **options)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(
        out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), upstream)
    return out.detach(), dict(zip(leaves, grads))


def assert_same(actual, expected, dtype=torch.float64):
    """Compare (output, gradients) with those of the reference in float64."""
    rtol, atol = TOLERANCE[dtype]
    out, grads = actual
    assert out.dtype == dtype
    assert_close(out.double(), expected[0], rtol=rtol, atol=atol)
    assert set(grads) == set(expected[1])
    for name, grad in grads.items():
        assert grad.dtype == dtype, name
        want = expected[1][name]
        # a gradient sums many terms: compare on its own scale
        size = want.abs().max().clamp(min=1.).item() if want.numel() else 1.
        assert_close(grad.double() / size, want / size, rtol=rtol, atol=atol,
                     msg=lambda text, name=name: f'{name}: {text}')


def bounce(i, n):
    while not 0 <= i < n:
        i = -i if i < 0 else 2 * (n - 1) - i
        if n == 1:
            return 0
    return i


def loops(query, key, value, rel_pos_h, rel_pos_w, k, scale=1., stride=1,
          dilation=1, padding_mode='mask'):
    """The equations as literal Python loops over everything."""
    q, ks, v = (x.detach().numpy() for x in (query, key, value))
    rel = None
    if rel_pos_h is not None:
        rel = rel_pos_h.detach().numpy(), rel_pos_w.detach().numpy()
    b, n, d, h, w = q.shape
    out = np.zeros((b, n, v.shape[2], -(-h // stride), -(-w // stride)))
    for i, j in itertools.product(range(b), range(n)):
        for y, x in itertools.product(range(out.shape[3]),
                                      range(out.shape[4])):
            qi = q[i, j, :, y * stride, x * stride]
            logits, values = [], []
            for dy, dx in itertools.product(range(k), range(k)):
                ny = y * stride + (dy - k // 2) * dilation
                nx = x * stride + (dx - k // 2) * dilation
                key_o, value_o = np.zeros(d), np.zeros(v.shape[2])
                if padding_mode == 'reflect':
                    ny, nx = bounce(ny, h), bounce(nx, w)
                if 0 <= ny < h and 0 <= nx < w:
                    key_o, value_o = ks[i, j, :, ny, nx], v[i, j, :, ny, nx]
                elif padding_mode == 'mask':
                    continue
                logit = qi @ key_o
                if rel is not None:
                    logit += qi @ np.concatenate(
                        [rel[0][j, :, dy], rel[1][j, :, dx]])
                logits.append(scale * logit)
                values.append(value_o)
            p = np.exp(np.array(logits) - max(logits))
            out[i, j, :, y, x] = (p / p.sum()) @ np.array(values)
    return torch.from_numpy(out)


GEOMETRIES = [
    pytest.param(dict(h=5, w=6), dict(k=3), id='k3'),
    pytest.param(dict(h=6, w=5, d=3, dv=5), dict(k=5), id='k5-odd-width'),
    pytest.param(dict(h=4, w=9, d=1, dv=2), dict(k=7), id='k7-one-channel'),
    pytest.param(dict(h=7, w=6), dict(k=3, stride=2), id='stride2'),
    pytest.param(dict(h=7, w=8), dict(k=3, stride=3), id='stride3'),
    pytest.param(dict(h=7, w=6), dict(k=3, dilation=2), id='dilation2'),
    pytest.param(dict(h=8, w=7), dict(k=5, stride=2, dilation=3),
                 id='stride2-dilation3'),
    pytest.param(dict(h=1, w=1), dict(k=7), id='map1x1'),
    pytest.param(dict(h=2, w=3), dict(k=7), id='map2x3'),
    pytest.param(dict(h=2, w=9), dict(k=7), id='map2x9'),
    pytest.param(dict(h=9, w=2), dict(k=7), id='map9x2'),
    pytest.param(dict(h=3, w=3), dict(k=1), id='k1'),
    pytest.param(dict(h=5, w=4), dict(k=1, stride=3), id='k1-stride3'),
]


@pytest.mark.parametrize('path', sorted(DATA.glob('local_attention_*.npz')),
                         ids=lambda p: p.stem[len('local_attention_'):])
@pytest.mark.parametrize('backend', BACKENDS)
def test_fixture_outputs_match(path, backend):
    data = np.load(path)
    config = json.loads(str(data['config']))
    x = {k: torch.from_numpy(data[k]) for k in data.files if k != 'config'}
    out = local_attention(
        x['q'], x['k'], x['v'], config.pop('kernel_size'),
        rel_pos_h=x.get('rel_h'), rel_pos_w=x.get('rel_w'), backend=backend,
        **config)
    assert_close(out, x['y'], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('padding_mode', PADDING_MODES)
@pytest.mark.parametrize('sizes, options', GEOMETRIES)
def test_reference_matches_literal_loops(sizes, options, padding_mode):
    inputs = make_inputs(k=options['k'], **sizes)
    options = dict(options, scale=0.7, padding_mode=padding_mode)
    expected = loops(**inputs, **options)
    k = options.pop('k')
    out, _ = run(inputs, k, 'reference', **options)
    assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('padding_mode', PADDING_MODES)
@pytest.mark.parametrize('sizes, options', GEOMETRIES)
@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
@pytest.mark.parametrize('backend', FAST_BACKENDS)
def test_backend_matches_reference(backend, dtype, sizes, options,
                                   padding_mode):
    options = dict(options, scale=0.7, padding_mode=padding_mode)
    k = options.pop('k')
    inputs = make_inputs(k=k, dtype=dtype, **sizes)
    exact = {name: x.detach().double() for name, x in inputs.items()}
    assert_same(
        run(inputs, k, backend, **options),
        run(exact, k, 'reference', **options), dtype)


@pytest.mark.parametrize('absent', [('key', ), ('rel_pos_h', 'rel_pos_w')],
                         ids=['no-key', 'no-positions'])
@pytest.mark.parametrize('padding_mode', PADDING_MODES)
@pytest.mark.parametrize('backend', FAST_BACKENDS)
def test_backend_matches_reference_without_optional_inputs(
        backend, padding_mode, absent):
    inputs = make_inputs(k=5)
    inputs.update({name: None for name in absent})
    options = dict(padding_mode=padding_mode, stride=2)
    assert_same(
        run(inputs, 5, backend, **options),
        run(inputs, 5, 'reference', **options))


def test_several_tiles_match_reference(monkeypatch):
    monkeypatch.setattr(torch_backend, '_TILE_ELEMENTS', 1)
    inputs = make_inputs(h=9, w=5, k=5)
    for options in (dict(), dict(stride=2, dilation=2)):
        assert_same(
            run(inputs, 5, 'torch', **options),
            run(inputs, 5, 'reference', **options))


@settings(max_examples=60, deadline=None)
@given(
    st.data(), st.sampled_from(FAST_BACKENDS), st.sampled_from(PADDING_MODES),
    st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3, 5, 7]))
def test_random_shapes_match_reference(data, backend, padding_mode, stride,
                                       dilation, k):
    size = st.integers(1, 9)
    inputs = make_inputs(
        b=data.draw(st.integers(0, 2)), n=data.draw(st.integers(1, 3)),
        d=data.draw(st.integers(1, 5)), dv=data.draw(st.integers(1, 5)),
        h=data.draw(size), w=data.draw(size), k=k,
        seed=data.draw(st.integers(0, 99)))
    options = dict(
        stride=stride, dilation=dilation, padding_mode=padding_mode,
        scale=data.draw(st.floats(0.01, 2.)))
    assert_same(
        run(inputs, k, backend, **options),
        run(inputs, k, 'reference', **options))


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('padding_mode', PADDING_MODES)
def test_gradients_match_finite_differences(backend, padding_mode):
    inputs = make_inputs(b=1, n=1, d=3, dv=2, h=4, w=3, k=3)

    def function(query, key, value, rel_pos_h, rel_pos_w):
        return local_attention(
            query, key, value, 3, rel_pos_h=rel_pos_h, rel_pos_w=rel_pos_w,
            stride=2, padding_mode=padding_mode, backend=backend)

    assert torch.autograd.gradcheck(
        function, [inputs[name] for name in ARGUMENTS])


@pytest.mark.parametrize('backend', BACKENDS)
def test_non_contiguous_inputs_match_contiguous_ones(backend):
    inputs = make_inputs(k=3)
    strided = dict(inputs)
    for name in ('query', 'key', 'value'):
        x = inputs[name].detach()
        strided[name] = x.permute(4, 2, 0, 3, 1).contiguous().permute(
            2, 4, 1, 3, 0)
        assert not strided[name].is_contiguous()
    assert_same(run(strided, 3, backend), run(inputs, 3, backend))


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('batch', [0, 1])
def test_small_batches_keep_shape_and_gradients(backend, batch):
    out, grads = run(make_inputs(b=batch, dv=3, k=3), 3, backend, stride=2)
    assert out.shape == (batch, 2, 3, 3, 4)
    assert grads['query'].shape == (batch, 2, 4, 6, 7)
    assert torch.isfinite(grads['rel_pos_h']).all()


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('padding_mode', PADDING_MODES)
def test_neighborhood_wider_than_the_map_is_legal(backend, padding_mode):
    inputs = make_inputs(b=1, d=8, h=5, w=40, k=7)
    options = dict(dilation=4, padding_mode=padding_mode)
    actual = run(inputs, 7, backend, **options)
    assert torch.isfinite(actual[0]).all()
    assert_same(actual, run(inputs, 7, 'reference', **options))


@pytest.mark.parametrize('backend', BACKENDS)
def test_nothing_outside_the_neighborhood_matters(backend):
    inputs = {k: x.detach() for k, x in make_inputs(h=9, w=9, k=3).items()}
    before, _ = run(inputs, 3, backend)
    for name in ('key', 'value'):
        changed = inputs[name].clone()
        keep = changed[..., 3:6, 3:6].clone()
        changed[:] = 1e6
        changed[..., 3:6, 3:6] = keep
        inputs[name] = changed
    after, _ = run(inputs, 3, backend)
    assert torch.equal(after[..., 4, 4], before[..., 4, 4])
    assert not torch.equal(after[..., 0, 0], before[..., 0, 0])


@pytest.mark.parametrize('backend', BACKENDS)
def test_border_rules_differ_only_at_the_border(backend):
    inputs = make_inputs(h=9, w=9, k=7)
    inputs['value'] = torch.ones_like(inputs['value'])
    outs = {
        mode: run(inputs, 7, backend, padding_mode=mode)[0]
        for mode in PADDING_MODES
    }
    for mode in ('mask', 'reflect'):
        assert_close(outs[mode], torch.ones_like(outs[mode]))
    assert (outs['zeros'][..., 0, 0] < 0.999).all()
    for mode in PADDING_MODES:
        assert_close(outs[mode][..., 3:6, 3:6], outs['mask'][..., 3:6, 3:6])


@pytest.mark.parametrize('backend', BACKENDS)
def test_neighborhood_that_covers_the_map_is_global_attention(backend):
    inputs = make_inputs(h=3, w=4, k=7)
    inputs['rel_pos_h'] = inputs['rel_pos_w'] = None
    out, _ = run(inputs, 7, backend, scale=0.3)
    q, k, v = (
        inputs[name].flatten(3).transpose(2, 3)
        for name in ('query', 'key', 'value'))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, scale=0.3)
    assert_close(out.flatten(3).transpose(2, 3), expected)


@pytest.mark.parametrize('backend', BACKENDS)
def test_heads_do_not_mix(backend):
    inputs = make_inputs(k=3)
    before, _ = run(inputs, 3, backend)
    query = inputs['query'].detach().clone()
    query[:, 0] *= 3
    after, _ = run(dict(inputs, query=query), 3, backend)
    assert torch.equal(after[:, 1], before[:, 1])
    assert (after[:, 0] != before[:, 0]).all()


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('dtype', [torch.float16, torch.float32], ids=str)
def test_large_logits_stay_finite(backend, dtype):
    # q . k = 1e4 * channel products: beyond the range of float16
    inputs = make_inputs(d=8, k=3, dtype=dtype)
    for name in ('query', 'key'):
        inputs[name] = inputs[name].detach() * 100
    out, grads = run(inputs, 3, backend)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(x).all() for x in grads.values())


@pytest.mark.parametrize('backend', FAST_BACKENDS)
@pytest.mark.parametrize('padding_mode', PADDING_MODES)
def test_custom_op_passes_opcheck(backend, padding_mode):
    inputs = make_inputs(k=3)
    args = (*(inputs[name] for name in ARGUMENTS), 3, 1., 2, 1, padding_mode,
            backend)
    result = torch.library.opcheck(
        torch.ops.acmix_det.local_attention.default, args)
    assert set(result.values()) == {'SUCCESS'}


@pytest.mark.parametrize('backend', FAST_BACKENDS)
def test_flop_counter_counts_every_product(backend):
    inputs = make_inputs(b=2, n=3, d=4, dv=5, h=6, w=7, k=3)
    with FlopCounterMode(display=False) as counter:
        run(inputs, 3, backend, stride=2)
    positions = 2 * 3 * 3 * 4
    # q.k, the separable q.r, attn.v
    products = positions * (9 * 4 + 3 * 4 + 9 * 5)
    counts = counter.get_flop_counts()['Global']
    by_name = {str(op).split('.')[-1]: n for op, n in counts.items()}
    assert by_name['local_attention'] == 2 * products
    assert by_name['local_attention_backward'] == 2 * (
        3 * products - positions * 9 * 5)


def test_no_intermediate_holds_k_squared_copies():
    from torch.utils._python_dispatch import TorchDispatchMode

    class LargestOutput(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out, ):
                if isinstance(x, torch.Tensor):
                    self.numel = max(self.numel, x.numel())
            return out

    b, n, d, h, w, k = 1, 2, 32, 12, 13, 7
    x = make_inputs(b=b, n=n, d=d, h=h, w=w, k=k, dtype=torch.float32)
    args = [x[name].detach() for name in ARGUMENTS]
    options = (k, 1., 1, 1, 'mask')
    with LargestOutput() as mode:
        torch_backend.local_attention(*args, *options)
        torch_backend.local_attention_backward(
            torch.ones_like(args[0]), *args, *options)
    # padded keys and the logits are allowed, k * k copies of keys are not
    assert 0 < mode.numel <= max(b * n * d * (h + 6) * (w + 6),
                                 b * n * k * k * h * w)


@pytest.mark.parametrize('backend', FAST_BACKENDS)
def test_deterministic_algorithms_repeat_bit_for_bit(backend):
    inputs = make_inputs(k=5, dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        first = run(inputs, 5, backend, padding_mode='reflect')
        second = run(inputs, 5, backend, padding_mode='reflect')
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first[0], second[0])
    for name, grad in first[1].items():
        assert torch.equal(grad, second[1][name]), name


def test_meta_tensors_give_the_shape():
    x = torch.empty(1, 2, 4, 9, 7, device='meta')
    out = local_attention(x, x, x[:, :, :3], 3, stride=2)
    assert out.device.type == 'meta' and out.shape == (1, 2, 3, 5, 4)


def test_compiled_function_matches_eager():
    inputs = {k: x.detach() for k, x in make_inputs(k=3).items()}

    def function(query, key, value):
        return local_attention(query.sin(), key, value, 3)

    args = [inputs[name] for name in ('query', 'key', 'value')]
    compiled = torch.compile(function, backend='aot_eager', fullgraph=True)
    assert_close(compiled(*args), function(*args))


@pytest.mark.parametrize('change, error, message', [
    (dict(query=torch.rand(4, 4, 4)), ValueError,
     r'query must have the shape \(B, N, D, H, W\), got \(4, 4, 4\)'),
    (dict(query='x'), TypeError, 'query must be a Tensor, got str'),
    (dict(query=torch.rand(2, 2, 0, 6, 7)), ValueError,
     r'query must have no empty dimension .* got \(2, 2, 0, 6, 7\)'),
    (dict(key=torch.rand(2, 2, 4, 7, 6)), ValueError,
     r'key must have the shape of query .*, got \(2, 2, 4, 7, 6\)'),
    (dict(value=torch.rand(2, 1, 4, 6, 7)), ValueError,
     r'value must have the shape \(2, 2, Dv, 6, 7\), got \(2, 1, 4, 6, 7\)'),
    (dict(value=torch.rand(2, 2, 0, 6, 7)), ValueError,
     r'value must have the shape .*, got \(2, 2, 0, 6, 7\)'),
    (dict(value=torch.rand(2, 2, 4, 6, 8)), ValueError,
     r'value must have the shape .*, got \(2, 2, 4, 6, 8\)'),
    (dict(value=torch.rand(2, 2, 4, 6)), ValueError,
     r'value must have the shape .*, got \(2, 2, 4, 6\)'),
    (dict(value=torch.rand(2, 2, 4, 6, 7).half()), TypeError,
     'value must have the dtype of query .*, got torch.float16'),
    (dict(query=torch.ones(2, 2, 4, 6, 7, dtype=torch.long)), TypeError,
     'query must be a dense tensor of type .*got torch.int64'),
    (dict(key=torch.rand(2, 2, 4, 6, 7, device='meta')), ValueError,
     'key must be on the device of query .*, got meta'),
    (dict(rel_pos_h=None), ValueError,
     'rel_pos_h and rel_pos_w must be given together, got rel_pos_h=None'),
    (dict(rel_pos_w=torch.rand(2, 2, 5)), ValueError,
     r'rel_pos_w must have the shape \(2, 2, 3\), got \(2, 2, 5\)'),
    (dict(key=None, rel_pos_h=None, rel_pos_w=None), ValueError,
     'key must be a Tensor where there are no relative positions'),
    (dict(attn_kernel_size=8), ValueError,
     'attn_kernel_size must be odd.*got 8'),
    (dict(attn_kernel_size=0), ValueError,
     'attn_kernel_size must be positive, got 0'),
    (dict(attn_kernel_size=3.), TypeError,
     'attn_kernel_size must be an int, got 3.0'),
    (dict(stride=0), ValueError, 'stride must be positive, got 0'),
    (dict(stride=2**62), ValueError, 'stride must be at most 65536, got 46'),
    (dict(dilation=2**61), ValueError, 'dilation must be at most 65536'),
    (dict(attn_kernel_size=2**61 + 1), ValueError,
     'attn_kernel_size must be at most 65536'),
    (dict(scale='1'), TypeError, "scale must be a number.*got '1'"),
    (dict(scale=torch.tensor(0.5)), TypeError, 'scale must be a number'),
    (dict(scale=10**400), ValueError, 'scale must be a finite number, got 10'),
    (dict(dilation=True), TypeError, 'dilation must be an int, got True'),
    (dict(scale=float('nan')), ValueError,
     'scale must be a finite number, got nan'),
    (dict(padding_mode='border'), ValueError,
     "padding_mode must be one of 'mask', 'zeros', 'reflect', got 'border'"),
    (dict(backend='cuda'), ValueError,
     "backend must be one of 'auto', .*, got 'cuda'"),
], ids=lambda x: '-'.join(x) if isinstance(x, dict) else '')
def test_bad_arguments_are_named_with_their_value(change, error, message):
    inputs = make_inputs(k=3, dtype=torch.float32)
    arguments = dict(inputs, attn_kernel_size=3)
    arguments.update(change)
    with pytest.raises(error, match=message):
        local_attention(**arguments)


@pytest.mark.parametrize('tensor', [
    torch.zeros(1, 1, 2, 3, 3, dtype=torch.float8_e4m3fn),
    torch.zeros(1, 1, 2, 3, 3).to_sparse()], ids=['float8', 'sparse'])
def test_types_that_no_backend_knows_are_refused(tensor):
    with pytest.raises(TypeError, match='query must be a dense tensor of'):
        local_attention(tensor, tensor, tensor, 3)


@pytest.mark.parametrize('backend', BACKENDS)
def test_forward_mode_differentiation_matches_reverse_mode(backend):
    q, k, v = torch.randn(3, 1, 2, 4, 5, 6, dtype=torch.float64)
    direction, weight = torch.randn_like(q), torch.randn_like(q)

    def function(x):
        return local_attention(x, k, v, 3, backend=backend)

    _, tangent = torch.func.jvp(function, (q, ), (direction, ))
    q.requires_grad_()
    grad, = torch.autograd.grad(function(q), q, weight)
    torch.testing.assert_close((tangent * weight).sum(),
                               (grad * direction).sum())


@pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')
@pytest.mark.gpu
@pytest.mark.parametrize('sizes, options', GEOMETRIES)
def test_cuda_matches_reference_on_cpu(sizes, options):
    options = dict(options)
    k = options.pop('k')
    inputs = make_inputs(k=k, **sizes)
    on_gpu = {name: x.detach().cuda() for name, x in inputs.items()}
    out, grads = run(on_gpu, k, 'torch', **options)
    actual = out.cpu(), {name: x.cpu() for name, x in grads.items()}
    assert_same(actual, run(inputs, k, 'reference', **options))

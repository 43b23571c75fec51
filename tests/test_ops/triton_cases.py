"""Triton kernels against the reference, in the interpreter or on a GPU.

``test_triton_backend.py`` runs this file in a process of its own: Triton
chooses its interpreter (TRITON_INTERPRET=1) once, when it is imported.
"""
import pytest
import torch

from acmix_det.ops import _triton_kernels, reference, triton_backend
from tests.test_ops.test_local_attention import (ARGUMENTS, GEOMETRIES,
                                                 PADDING_MODES, assert_same,
                                                 make_inputs, run)

DEVICE = 'cpu' if _triton_kernels.INTERPRETED else 'cuda'


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles on small maps."""
    monkeypatch.setattr(triton_backend, '_tile',
                        lambda width: triton_backend._Tile(4, 4, 4, 1))


def run_triton(inputs, k, scale=1., stride=1, dilation=1,
               padding_mode='mask'):
    """What ``run`` returns, from the backend itself, on the CPU."""
    options = (k, scale, stride, dilation, padding_mode)
    tensors = [
        None if inputs[name] is None else inputs[name].detach().to(DEVICE)
        for name in ARGUMENTS
    ]
    assert triton_backend.can_use(tensors[0]) is None
    out = triton_backend.local_attention(*tensors, *options)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(
        out.shape, generator=generator, dtype=torch.float64)
    grads = triton_backend.local_attention_backward(
        upstream.to(out), *tensors, *options)
    given = [name for name in ARGUMENTS if inputs[name] is not None]
    assert [g is None for g in grads] == [x is None for x in tensors]
    grads = [g.cpu() for g in grads if g is not None]
    return out.cpu(), dict(zip(given, grads))


def assert_matches_reference(inputs, k, **options):
    exact = {
        name: None if x is None else x.detach().double()
        for name, x in inputs.items()
    }
    assert_same(
        run_triton(inputs, k, **options),
        run(exact, k, 'reference', **options), inputs['query'].dtype)


def geometry_cases():
    """Every geometry with every border rule.

    In the interpreter, which takes seconds, with two of the three in turn.
    """
    cases = []
    for i, geometry in enumerate(GEOMETRIES):
        for mode in PADDING_MODES:
            if DEVICE == 'cpu' and mode == PADDING_MODES[i % 2]:
                continue
            cases.append(
                pytest.param(*geometry.values, mode,
                             id=f'{geometry.id}-{mode}'))
    return cases


@pytest.mark.parametrize('sizes, options, padding_mode', geometry_cases())
def test_float32_matches_reference(sizes, options, padding_mode, request):
    if padding_mode != 'reflect' or 'dilation' in options:
        request.getfixturevalue('small_tiles')
    options = dict(options, scale=0.7, padding_mode=padding_mode)
    k = options.pop('k')
    inputs = make_inputs(b=1, n=1, k=k, dtype=torch.float32, **sizes)
    assert_matches_reference(inputs, k, **options)


@pytest.mark.parametrize('padding_mode', PADDING_MODES)
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_half_types_match_reference(dtype, padding_mode):
    inputs = make_inputs(b=1, n=1, d=5, dv=3, h=5, w=4, k=3, dtype=dtype)
    assert_matches_reference(
        inputs, 3, stride=2, padding_mode=padding_mode)


def test_batches_heads_and_tiles_match_reference():
    inputs = make_inputs(b=2, n=2, d=3, h=2, w=9, k=3, dtype=torch.float32)
    assert_matches_reference(inputs, 3)


@pytest.mark.parametrize('absent', [('key', ), ('rel_pos_h', 'rel_pos_w')],
                         ids=['no-key', 'no-positions'])
@pytest.mark.parametrize('padding_mode', ['mask', 'reflect'])
def test_optional_inputs_may_be_absent(padding_mode, absent):
    inputs = make_inputs(b=1, n=2, h=5, w=4, k=3, dtype=torch.float32)
    inputs.update({name: None for name in absent})
    assert_matches_reference(inputs, 3, stride=2, padding_mode=padding_mode)


def test_tile_that_sees_several_blocks_matches_reference(monkeypatch):
    # 16 + 2 columns, in blocks of 16
    monkeypatch.setattr(triton_backend, '_tile',
                        lambda width: triton_backend._Tile(1, 16, 4, 1))
    inputs = make_inputs(b=1, n=1, d=2, h=2, w=19, dtype=torch.float32)
    assert_matches_reference(inputs, 3)


def test_wide_values_are_taken_in_parts(monkeypatch, small_tiles):
    monkeypatch.setattr(triton_backend, '_MAX_WIDTH', 4)
    inputs = make_inputs(b=1, n=1, d=4, dv=6, h=3, w=4, dtype=torch.float32)
    assert_matches_reference(inputs, 3)
    inputs.update(rel_pos_h=None, rel_pos_w=None)
    assert_matches_reference(inputs, 3, padding_mode='reflect')
    with pytest.raises(AssertionError, match='at most 4 channels .* got 5'):
        run_triton(make_inputs(d=5, dtype=torch.float32), 3)


def test_views_are_read_in_place_and_every_element_is_written(
        monkeypatch, small_tiles):
    inputs = make_inputs(b=1, h=3, w=6, d=3, dv=5, dtype=torch.float32)
    views = []
    for name in ARGUMENTS[:3]:
        x = inputs[name].detach().permute(4, 2, 0, 3, 1)
        frame = torch.full([s + 2 for s in x.shape], float('nan'),
                           device=DEVICE)
        inner = frame[tuple(slice(1, 1 + s) for s in x.shape)]
        inner.copy_(x)
        views.append(inner.permute(2, 4, 1, 3, 0))
        assert not views[-1].is_contiguous()
    rel_pos = [inputs[name].detach().to(DEVICE) for name in ARGUMENTS[3:]]
    options = (3, 1., 2, 1, 'zeros')

    def poisoned(self, *shape, dtype=None, device=None):
        return torch.full(shape, float('nan'), dtype=dtype or self.dtype,
                          device=device or self.device)

    monkeypatch.setattr(torch.Tensor, 'new_empty', poisoned)
    out = triton_backend.local_attention(*views, *rel_pos, *options)
    grad = torch.ones((), device=DEVICE).expand(out.shape)
    grads = triton_backend.local_attention_backward(grad, *views, *rel_pos,
                                                    *options)
    exact = [
        inputs[name].detach().double().requires_grad_() for name in ARGUMENTS
    ]
    want = reference.local_attention(*exact, *options)
    want_grads = torch.autograd.grad(want.sum(), exact)
    assert_same((out.cpu(), {
        name: x.cpu()
        for name, x in zip(ARGUMENTS, grads)
    }), (want, dict(zip(ARGUMENTS, want_grads))), torch.float32)


def test_empty_batch_keeps_shapes():
    inputs = make_inputs(b=0, d=4, dv=3, dtype=torch.float32)
    out, grads = run_triton(inputs, 3, stride=2)
    assert out.shape == (0, 2, 3, 3, 4)
    for name, x in inputs.items():
        assert grads[name].shape == x.shape, name
    assert not grads['rel_pos_h'].any() and not grads['rel_pos_w'].any()


@pytest.mark.parametrize('dtype', [torch.float16, torch.float32], ids=str)
def test_large_logits_stay_finite(dtype):
    # q . k = 1e4 * channel products: beyond the range of float16
    inputs = make_inputs(b=1, n=1, d=8, h=4, w=3, dtype=dtype)
    for name in ('query', 'key'):
        inputs[name] = inputs[name].detach() * 100
    out, grads = run_triton(inputs, 3)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(x).all() for x in grads.values())


def test_results_repeat_bit_for_bit(small_tiles):
    inputs = make_inputs(b=1, n=1, h=5, w=4, dtype=torch.float32)
    first = run_triton(inputs, 3, padding_mode='reflect')
    second = run_triton(inputs, 3, padding_mode='reflect')
    assert torch.equal(first[0], second[0])
    for name, grad in first[1].items():
        assert torch.equal(grad, second[1][name]), name

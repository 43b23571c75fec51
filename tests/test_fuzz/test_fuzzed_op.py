"""local_attention on random shapes, layouts, types and values."""
import contextlib

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from acmix_det.ops import cpu_backend, local_attention
from tests.test_fuzz.hostile import HOSTILE, assert_names_one_of, examples
from tests.test_ops.test_local_attention import (ARGUMENTS, BACKENDS,
                                                 FAST_BACKENDS,
                                                 PADDING_MODES, TOLERANCE)

LAYOUTS = ('contiguous', 'offset', 'gaps', 'channels_last', 'permuted',
           'expanded')


def lay_out(x, layout):
    """The values of x in another layout, in the middle of NaNs."""
    if layout == 'contiguous' or not x.numel():
        return x
    if layout == 'expanded':
        return x[..., :1].expand(x.shape)
    order = list(range(x.dim()))
    if layout == 'channels_last':
        order = [0, *order[2:], 1]
    elif layout == 'permuted':
        order = order[::-1]
    step = 2 if layout == 'gaps' else 1
    shape = [x.shape[i] * step + 2 for i in order]
    memory = torch.full(shape, float('nan'), dtype=x.dtype)
    inside = memory[tuple(slice(1, -1, step) for _ in shape)]
    view = inside.permute(sorted(order, key=order.__getitem__))
    return view.copy_(x)


@st.composite
def problems(draw, dtypes=tuple(TOLERANCE)):
    """Tensors and options of local_attention."""
    options = dict(
        attn_kernel_size=draw(st.sampled_from([1, 3, 5, 7, 9, 15])),
        scale=draw(st.sampled_from([1., 0.35, -1., 0., 3.])),
        stride=draw(st.sampled_from([1, 1, 2, 3, 8])),
        dilation=draw(st.sampled_from([1, 1, 2, 3, 9])),
        padding_mode=draw(st.sampled_from(PADDING_MODES)))
    dtype = draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    k = options['attn_kernel_size']
    b, n = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    d, dv = draw(st.integers(1, 19)), draw(st.integers(1, 19))
    h, w = draw(st.integers(1, 23)), draw(st.integers(1, 40))
    size = draw(st.sampled_from([1., 1., 30.]))  # logits to 1e4

    def rand(*shape):
        return torch.randn(shape, generator=generator,
                           dtype=torch.float64).to(dtype)

    tensors = dict(
        query=rand(b, n, d, h, w) * size,
        key=rand(b, n, d, h, w) * size,
        value=rand(b, n, dv, h, w),
        rel_pos_h=rand(n, d // 2, k),
        rel_pos_w=rand(n, d - d // 2, k))
    absent = draw(st.sampled_from([(), (), ('key', ), ARGUMENTS[3:]]))
    tensors = {
        name: lay_out(x, draw(st.sampled_from(LAYOUTS)))
        for name, x in tensors.items() if name not in absent
    }
    return tensors, options


def run(tensors, options, with_grad, upstream_layout='contiguous'):
    """Output, and the gradients of the tensors in ``with_grad``."""
    leaves = {
        name: x.detach().requires_grad_(name in with_grad)
        for name, x in tensors.items()
    }
    out = local_attention(**{'key': None, **leaves}, **options)
    if not with_grad:
        assert not out.requires_grad
        return out, {}
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(
        out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad(out, [leaves[name] for name in with_grad],
                                lay_out(upstream, upstream_layout))
    return out.detach(), dict(zip(with_grad, grads))


def capabilities():
    """Instruction sets of this processor."""
    if cpu_backend.can_use(torch.zeros(1)) is not None:
        return [None]
    best, found = cpu_backend.capability(), []
    for name in ('avx512', 'avx2', 'baseline'):
        with contextlib.suppress(ValueError):
            cpu_backend.set_capability(name)
            found.append(name)
    cpu_backend.set_capability(best)
    return found


CAPABILITIES = capabilities()


@contextlib.contextmanager
def instruction_set(name):
    if name is None:
        yield
        return
    best = cpu_backend.capability()
    cpu_backend.set_capability(name)
    try:
        yield
    finally:
        cpu_backend.set_capability(best)


def largest_logit(tensors, options):
    """A bound."""
    def top(name):
        x = tensors.get(name)
        return x.abs().max().item() if x is not None and x.numel() else 0.

    others = top('key') + max(top('rel_pos_h'), top('rel_pos_w'))
    return (abs(options['scale']) * tensors['query'].shape[2] * top('query')
            * others)


@examples(250)
@given(st.data(), problems(), st.sampled_from([*BACKENDS, 'cpu', 'cpu']),
       st.sampled_from(CAPABILITIES))
def test_every_backend_computes_what_the_reference_does(data, problem,
                                                        backend, capability):
    tensors, options = problem
    with_grad = [x for x in tensors if data.draw(st.booleans(), label=x)]
    layout = data.draw(st.sampled_from(LAYOUTS), label='upstream')
    with instruction_set(capability):
        out, grads = run(tensors, dict(options, backend=backend), with_grad,
                         layout)
    expected_out, expected = run(
        {name: x.double() for name, x in tensors.items()},
        dict(options, backend='reference'), with_grad, layout)
    dtype = tensors['query'].dtype
    rtol, atol = (x * max(1., largest_logit(tensors, options) / 20)
                  for x in TOLERANCE[dtype])
    assert out.dtype == dtype
    assert_close(out.double(), expected_out, rtol=rtol, atol=atol)
    for name, grad in grads.items():
        want = expected[name]
        assert grad.dtype == dtype and grad.shape == tensors[name].shape
        # a sum of this many terms may cancel
        terms = tensors['query'].numel() if name.startswith('rel_pos') else 1
        size = max(terms**0.5 / 10, 1.)
        if want.numel():
            size = max(want.abs().max().item(), size)
        assert_close(grad.double() / size, want / size, rtol=rtol, atol=atol,
                     msg=lambda text, name=name: f'{name}: {text}')


@examples(150)
@given(st.data(), problems(), st.sampled_from(FAST_BACKENDS),
       st.sampled_from(['query', 'key', 'value']),
       st.sampled_from([float('nan'), float('inf'), -float('inf')]),
       st.sampled_from(CAPABILITIES))
def test_values_that_are_not_finite_stay_in_the_neighborhood(
        data, problem, backend, name, value, capability):
    tensors, options = problem
    tensors = {n: x.contiguous() for n, x in tensors.items()}
    if name not in tensors or not tensors[name].numel():
        return
    shape = tensors[name].shape
    at = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    broken = dict(tensors, **{name: tensors[name].clone()})
    broken[name][at] = value
    options = dict(options, backend=backend)
    names = list(tensors)
    with instruction_set(capability):
        out, grads = run(tensors, options, names)
        broken_out, broken_grads = run(broken, options, names)

    # what depends on the place: attention without logits shows it
    b, n, _, h, w = shape
    plain = dict(query=torch.zeros(b, n, 1, h, w, dtype=torch.float64))
    plain['key'] = plain['query']
    plain['value'] = plain['query'].clone()
    plain['value'][at[0], at[1], 0, at[3], at[4]] = 1
    plain['value'].requires_grad_()
    reached = local_attention(
        **plain, **dict(options, backend='reference'))
    if name == 'query':
        changed = torch.zeros_like(reached, dtype=torch.bool)
        if at[3] % options['stride'] == at[4] % options['stride'] == 0:
            changed[at[0], at[1], 0, at[3] // options['stride'],
                    at[4] // options['stride']] = True
    else:
        changed = reached > 0
    same = ~changed.expand(out.shape)
    assert torch.equal(broken_out[same], out[same])
    # of keys and values: whatever a changed query reads
    changed_grad, = torch.autograd.grad(
        reached, plain['value'], changed.to(reached))
    queries = torch.zeros_like(changed_grad, dtype=torch.bool)
    queries[..., ::options['stride'], ::options['stride']] = changed
    for grad, where in (('query', queries), ('key', changed_grad > 0),
                        ('value', changed_grad > 0)):
        if grad in grads:
            same = ~where.expand(grads[grad].shape)
            assert torch.equal(broken_grads[grad][same], grads[grad][same])
    # and what is not finite is not hidden
    exact, _ = run({n: x.double() for n, x in broken.items()},
                   dict(options, backend='reference'), names)
    assert torch.equal(broken_out.isfinite(), exact.isfinite())


NAMES = [*ARGUMENTS, 'attn_kernel_size', 'scale', 'stride', 'dilation',
         'padding_mode', 'backend']
TENSORS = [torch.zeros(shape, dtype=dtype)
           for shape in ((), (0, ), (1, 1, 2, 3, 3), (1, 1, 2, 0, 3),
                         (1, 1, 3), (1, 1, 2, 3, 3, 1))
           for dtype in (torch.float64, torch.float32, torch.int64,
                         torch.bool, torch.complex64)]


@examples(200)
@given(st.sampled_from(NAMES), st.sampled_from([*HOSTILE, *TENSORS]))
def test_bad_arguments_are_named_or_work(name, value):
    x = torch.ones(1, 1, 2, 3, 3)
    arguments = dict(query=x, key=x, value=x, rel_pos_h=torch.ones(1, 1, 3),
                     rel_pos_w=torch.ones(1, 1, 3), attn_kernel_size=3)
    arguments[name] = value
    try:
        out = local_attention(**arguments)
    except (TypeError, ValueError) as error:
        if name in ARGUMENTS:  # any of them may be the odd one
            assert any(x in str(error) for x in ARGUMENTS)
        else:
            assert_names_one_of(error, {name: value})
        return
    assert out.shape[:3] == (1, 1, 2)

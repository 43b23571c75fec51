"""What every layer that stands in for nn.Conv2d promises."""
import copy

import pytest
import torch
from mmcv.cnn import ConvModule, build_conv_layer
from mmengine.registry import DefaultScope
from torch import nn
from torch.testing import assert_close

LAYERS = ('SASA', 'ACmix')


def build(layer, in_channels=16, out_channels=32, kernel_size=3, stride=1,
          padding=1, **kwargs):
    cfg = dict(type=layer, num_heads=4)
    for key in ('num_heads', 'attn_kernel_size', 'backend', 'padding_mode',
                'conv_kernel_size', 'position', 'use_key'):
        if key in kwargs:
            cfg[key] = kwargs.pop(key)
    torch.manual_seed(0)
    return build_conv_layer(cfg, in_channels, out_channels, kernel_size,
                            stride=stride, padding=padding, **kwargs)


@pytest.fixture(params=LAYERS)
def layer(request):
    return request.param


@pytest.mark.parametrize('size', [(1, 1), (1, 2), (2, 1), (2, 9), (9, 2),
                                  (3, 6), (7, 1), (9, 7), (8, 10)], ids=str)
@pytest.mark.parametrize('kernel, stride, dilation', [(3, 1, 1), (3, 2, 1),
                                                      (3, 3, 1), (5, 2, 1),
                                                      (3, 1, 2), (3, 2, 3)])
def test_output_size_is_that_of_the_convolution(layer, size, kernel, stride,
                                                dilation):
    arguments = dict(kernel_size=kernel, stride=stride, dilation=dilation,
                     padding=dilation * (kernel // 2))
    attention = build(layer, **arguments)
    x = torch.randn(2, 16, *size, requires_grad=True)
    out = attention(x)
    assert out.shape == nn.Conv2d(16, 32, **arguments)(x).shape
    out.square().sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(x.grad).all()


@pytest.mark.parametrize('size', [(2, 9), (9, 2), (1, 1), (5, 6)], ids=str)
def test_backends_agree_on_degenerate_maps(layer, size):
    x = torch.randn(1, 16, *size, dtype=torch.float64)
    portable = build(layer, backend='torch').double()
    literal = build(layer, backend='reference').double()
    literal.load_state_dict(portable.state_dict())
    assert_close(portable(x), literal(x), rtol=1e-10, atol=1e-10)


def test_attributes_are_those_of_the_convolution(layer):
    arguments = dict(kernel_size=3, stride=2, padding=2, dilation=2)
    attention = build(layer, **arguments)
    conv = nn.Conv2d(16, 32, **arguments)
    for name in ('in_channels', 'out_channels', 'kernel_size', 'stride',
                 'padding', 'dilation', 'groups', 'transposed',
                 'output_padding'):
        assert getattr(attention, name) == getattr(conv, name), name
    assert not any(isinstance(m, nn.Conv2d) for m in attention.modules())


def test_bias_is_added_to_the_output(layer):
    with_bias = build(layer, bias=True)
    without = build(layer, bias=False)
    assert without.bias is None and with_bias.bias.shape == (32, )
    state = with_bias.state_dict()
    del state['bias']
    without.load_state_dict(state)
    with torch.no_grad():
        with_bias.bias.copy_(torch.arange(32.))
    x = torch.randn(1, 16, 5, 4)
    assert_close(with_bias(x),
                 without(x) + torch.arange(32.)[:, None, None])


@pytest.mark.parametrize('batch', [0, 1])
def test_batch_of_none_and_one(layer, batch):
    assert build(layer, stride=2)(torch.randn(batch, 16, 5, 4)).shape == (
        batch, 32, 3, 2)


@pytest.mark.parametrize('view', [
    lambda x: x.to(memory_format=torch.channels_last),
    lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
], ids=['channels-last', 'transposed'])
def test_memory_layout_does_not_matter(layer, view):
    attention = build(layer)
    x = torch.randn(2, 16, 6, 5)
    assert not view(x).is_contiguous()
    assert_close(attention(view(x)), attention(x), rtol=1e-5, atol=1e-5)


def test_images_of_a_batch_do_not_mix(layer):
    attention = build(layer).double()
    x = torch.randn(3, 16, 6, 5, dtype=torch.float64)
    assert_close(attention(x)[1:2], attention(x[1:2]))


@pytest.mark.parametrize('scope', [None, 'mmdet', 'mmseg-like'])
def test_layers_build_in_any_default_scope(layer, scope):
    if scope is None:
        assert build(layer).out_channels == 32
    else:
        with DefaultScope.overwrite_default_scope(scope):
            assert build(layer).out_channels == 32


def test_conv_module_uses_the_layer(layer):
    module = ConvModule(
        16, 32, 3, stride=2, padding=1,
        conv_cfg=dict(type=layer, num_heads=4), norm_cfg=dict(type='BN'))
    out = module(torch.randn(2, 16, 9, 7))
    assert out.shape == (2, 32, 5, 4) and (out >= 0).all()
    assert module.conv.bias is None and module.stride == (2, 2)


def test_conv_module_does_not_overwrite_start_values(layer):
    module = ConvModule(16, 32, 3, padding=1,
                        conv_cfg=dict(type=layer, num_heads=4))
    torch.manual_seed(3)
    module.init_weights()
    torch.manual_seed(3)
    untouched = copy.deepcopy(module.conv)
    before = {k: v.clone() for k, v in module.conv.state_dict().items()}
    module.init_weights()
    for name, value in module.conv.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert untouched.bias.abs().sum() == 0


def test_conv_module_norm_follows_attention(layer):
    from mmcv.cnn.utils import fuse_conv_bn
    module = ConvModule(
        16, 32, 3, padding=1, conv_cfg=dict(type=layer, num_heads=4),
        norm_cfg=dict(type='BN')).eval()
    module.bn.running_mean.uniform_(-1, 1)
    x = torch.randn(1, 16, 5, 6)
    before = module(x)
    assert_close(fuse_conv_bn(module)(x), before)


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16,
                                   torch.float16], ids=str)
def test_every_floating_type_keeps_its_type(layer, dtype):
    attention = build(layer)
    x = torch.randn(1, 16, 9, 7)
    expected = attention.double()(x.double())
    out = attention.to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    assert all(p.dtype == dtype for p in attention.parameters())
    tolerance = {torch.float64: 1e-9}.get(dtype, 0.1)
    assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_autocast_gives_finite_float32_gradients(layer):
    attention = build(layer)
    x = torch.randn(2, 16, 7, 5, requires_grad=True)
    with torch.autocast('cpu', torch.bfloat16):
        out = attention(x)
    out.float().square().sum().backward()
    assert_close(out.float(), attention(x), rtol=0.1, atol=0.1)
    for name, p in attention.named_parameters():
        assert p.grad.dtype == torch.float32, name
        assert torch.isfinite(p.grad).all(), name


def test_everything_moves_with_the_module(layer):
    attention = build(layer, stride=2)
    out = attention.to('meta')(torch.empty(1, 16, 8, 8, device='meta'))
    assert out.device.type == 'meta' and out.shape == (1, 32, 4, 4)
    assert list(attention.buffers()) == []
    assert not any(isinstance(x, torch.Tensor)
                   for x in attention.__dict__.values())


def test_state_dict_round_trip_at_another_size(layer):
    first, second = build(layer), build(layer)
    first(torch.randn(1, 16, 6, 5))
    with torch.no_grad():
        for p in second.parameters():
            p.add_(1)
    second.load_state_dict(first.state_dict())
    x = torch.randn(1, 16, 9, 11)
    assert torch.equal(second(x), first(x))


def test_every_parameter_gets_a_finite_gradient(layer):
    attention = build(layer)
    attention(torch.randn(2, 16, 6, 5)).square().sum().backward()
    for name, p in attention.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), name
        if name != 'pos_bias':  # no effect, by definition
            assert p.grad.abs().sum() > 0, name


def test_deterministic_algorithms_repeat_bit_for_bit(layer, recwarn):
    attention = build(layer)
    x = torch.randn(1, 16, 9, 9)
    grads = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            attention.zero_grad()
            attention(x).square().sum().backward()
            grads.append([p.grad.clone() for p in attention.parameters()])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert not [w for w in recwarn if 'determinis' in str(w.message)]


def test_cropping_changes_nothing_far_from_the_cut(layer):
    # ACmix's coordinates depend on the size of the map; without them both do
    attention = build(layer, attn_kernel_size=7).double()
    if layer == 'ACmix':
        torch.nn.init.zeros_(attention.pos_weight)
    x = torch.randn(1, 16, 12, 20, dtype=torch.float64)
    assert_close(attention(x)[..., :9], attention(x[..., :12])[..., :9])


@pytest.mark.parametrize('change, error, message', [
    (dict(kernel_size=1, padding=0), ValueError,
     'kernel_size must be odd and larger than 1 .*got 1'),
    (dict(kernel_size=4), ValueError, 'kernel_size must be odd .*got 4'),
    (dict(kernel_size=(3, 5)), ValueError,
     r'kernel_size must be the same in both directions, got \(3, 5\)'),
    (dict(stride=(1, 2)), ValueError, r'stride must be .*got \(1, 2\)'),
    (dict(stride=0), ValueError, 'stride must be positive, got 0'),
    (dict(padding=0), ValueError, 'padding must be .*= 1, .*got 0'),
    (dict(padding='same'), ValueError, "padding must be .*got 'same'"),
    (dict(groups=2), ValueError, 'groups must be 1, got 2'),
    (dict(out_channels=30), ValueError,
     'out_channels must be divisible by num_heads, got out_channels=30, '
     'num_heads=4; num_heads=[35] would do'),
    (dict(in_channels=0), ValueError, 'in_channels must be positive, got 0'),
    (dict(num_heads=0), ValueError, 'num_heads must be positive, got 0'),
    # not an hour of looking for divisors, nor a failure in forward only
    (dict(out_channels=2**31 + 1), ValueError,
     'out_channels must be at most 65536, got 2147483649'),
    (dict(in_channels=2**63), ValueError, 'in_channels must be at most 65536'),
    (dict(stride=2**31), ValueError, 'stride must be at most 65536, got 21'),
    (dict(dilation=2**17, padding=2**17), ValueError,
     'dilation must be at most 65536, got 131072'),
    (dict(attn_kernel_size=1024), ValueError,
     'attn_kernel_size must be odd.*got 1024'),
    (dict(attn_kernel_size=0), ValueError,
     'attn_kernel_size must be positive, got 0'),
    (dict(attn_kernel_size='7'), TypeError,
     "attn_kernel_size must be an int, got '7'"),
    (dict(padding_mode='circular'), ValueError,
     "padding_mode must be one of .*got 'circular'"),
    (dict(backend='fast'), ValueError, "backend must be one of .*got 'fast'"),
], ids=lambda x: ','.join(x) if isinstance(x, dict) else '')
def test_bad_arguments_are_refused_by_the_constructor(layer, change, error,
                                                      message):
    with pytest.raises(error, match=message):
        build(layer, **change)


def test_arguments_after_those_of_the_convolution_are_keyword_only(layer):
    cls = type(build(layer))
    with pytest.raises(TypeError, match='positional argument'):
        cls(64, 64, 3, 1, 1, 1, 1, True, 1024)


def test_wrong_input_is_named_with_its_shape(layer):
    with pytest.raises(ValueError, match=r'x must have the shape '
                       r'\(B, 16, H, W\), got \(1, 8, 5, 5\)'):
        build(layer)(torch.randn(1, 8, 5, 5))


def test_repr_shows_what_differs_from_the_defaults(layer):
    text = repr(build(layer, dilation=2, padding=2, bias=False,
                      backend='torch'))
    for part in ('16, 32', 'kernel_size=(3, 3)', 'num_heads=4',
                 'dilation=(2, 2)', 'bias=False', "backend='torch'"):
        assert part in text


@pytest.mark.parametrize('key, changes', [
    ('SASA', dict(use_key=False)),
    ('ACmix', dict(conv_kernel_size=5, num_shift_sets=2))])
def test_repr_leaves_out_what_is_as_by_default(key, changes):
    hidden = 'dilation', 'bias', 'backend', 'with_cp', *changes
    layers = [build_conv_layer(dict(type=key, **options), 16, 16, 3, padding=1)
              for options in ({}, changes)]
    assert not [name for name in hidden if name in repr(layers[0])]
    for name, value in changes.items():
        assert f', {name}={value}' in repr(layers[1])


def test_nearest_number_of_heads_is_named(layer):
    for heads, nearest in ((6, 7), (2, 1)):
        with pytest.raises(ValueError, match=f'num_heads={nearest} would do'):
            build(layer, out_channels=7, num_heads=heads)


@pytest.mark.parametrize('key', ['SASA', 'ACmix'])
def test_checkpointing_keeps_less_and_changes_no_gradient(key):
    x = torch.randn(2, 16, 9, 7, dtype=torch.float64)
    results = []
    for with_cp in (False, True):
        torch.manual_seed(0)
        layer = build_conv_layer(dict(type=key, with_cp=with_cp), 16, 16, 3,
                                 padding=1).double()
        kept = []

        def keep(tensor):
            kept.append(tensor.numel())
            return tensor

        x.grad, x.requires_grad = None, True
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = layer(x)
        out.square().sum().backward()
        grads = {k: p.grad for k, p in layer.named_parameters()}
        results.append((out, x.grad, grads, sum(kept)))
    plain, checked = results
    for actual, expected in zip(checked[:3], plain[:3]):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert checked[3] < plain[3] / 2
    assert ', with_cp=True' in repr(layer)

"""Field cases of the layers: ACmix, SASA, arguments, sizes, borders.

What each id is about stands in docs/field_cases.md.
"""
import itertools

import pytest
import torch
import torch.nn.functional as F
from mmcv.cnn import ConvModule, build_conv_layer
from mmengine.config import Config
from torch import nn
from torch.testing import assert_close

from acmix_det.checkpoints import convert_acmix
from acmix_det.evaluation import build_detector
from acmix_det.layers import (ACmix2d, AttentionConv2d, SASAStem2d,
                              StandAloneSelfAttention2d)
from acmix_det.models import (ACmixFPN, ACmixResNet, SASAFPN, SASAResNet,
                              SASARetinaHead)
from acmix_det.ops import local_attention
from tests.test_checkpoints import released_layer
from tests.test_configs import ROOT as CONFIGS
from tests.test_ops.test_local_attention import loops

LAYERS = (StandAloneSelfAttention2d, ACmix2d)
BACKENDS = ('reference', 'torch', 'auto')
PADDING_MODES = ('mask', 'zeros', 'reflect')
both_layers = pytest.mark.parametrize('cls', LAYERS)
gpu = pytest.mark.gpu


def build(cls, in_channels=16, out_channels=None, stride=1, dilation=1,
          bias=False, **kwargs):
    torch.manual_seed(0)
    kwargs = {'num_heads': 4, 'attn_kernel_size': 7, **kwargs}
    return cls(in_channels, out_channels or in_channels, 3, stride, dilation,
               dilation, bias=bias, **kwargs)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def sasa_loops(layer, x):
    """SASA with relative positions and stride 1 as literal loops."""
    b, _, h, w = x.shape
    q, k, v = F.conv2d(x, layer.in_proj_weight[:, :, None, None]).reshape(
        b, 3, layer.num_heads, layer.head_dim, h, w).unbind(1)
    return loops(q, k, v, layer.rel_pos_h, layer.rel_pos_w,
                 layer.attn_kernel_size, dilation=layer.dilation[0],
                 padding_mode=layer.padding_mode).flatten(1, 2)


def acmix_loops(layer, x):
    """ACmix as literal loops over taps, offsets and pixels."""
    b, _, h, w = x.shape
    heads, d = layer.num_heads, layer.head_dim
    stride, dilation = layer.stride[0], layer.dilation[0]
    weight = layer.in_proj_weight.detach()[:, :, None, None]
    qkv = F.conv2d(x, weight, layer.in_proj_bias.detach()).reshape(
        b, 3 * heads, d, h, w)
    q, k, v = qkv.reshape(b, 3, heads, d, h, w).unbind(1)
    rows, cols = (torch.linspace(-1, 1, n, dtype=x.dtype) if n > 1 else
                  -torch.ones(1, dtype=x.dtype) for n in (h, w))
    place = torch.stack([cols.expand(h, w), rows[:, None].expand(h, w)])
    position = torch.einsum('dc,chw->dhw', layer.pos_weight.detach(), place)
    attention = loops(q, k - position, v, None, None, layer.attn_kernel_size,
                      scale=d**-0.5, stride=stride, dilation=dilation,
                      padding_mode=layer.padding_mode).flatten(1, 2)
    mixed = torch.einsum('tm,bmdhw->bdthw', layer.fc_weight.detach(), qkv)
    kernels = layer.shift_weight.detach().mean(0)  # (D * N, taps, kc, kc)
    kc = kernels.shape[-1]
    out = torch.zeros(b, d * heads, *attention.shape[2:], dtype=x.dtype)
    for c, y, x_ in itertools.product(range(d * heads),
                                      *map(range, out.shape[2:])):
        for i, j in itertools.product(range(kc), range(kc)):
            ny = y * stride + (i - kc // 2) * dilation
            nx = x_ * stride + (j - kc // 2) * dilation
            if 0 <= ny < h and 0 <= nx < w:
                out[:, c, y, x_] += mixed[:, c // heads, :, ny,
                                          nx] @ kernels[c, :, i, j]
    return layer.alpha.item() * attention + layer.beta.item() * out


def assert_equals_loops(layer, x):
    definition = acmix_loops if isinstance(layer, ACmix2d) else sasa_loops
    layer = layer.double()
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name in ('shift_weight', 'in_proj_bias', 'pos_bias'):
                p.add_(0.3 * torch.randn_like(p))
        assert_close(layer(x), definition(layer, x), rtol=1e-10, atol=1e-10)


def detector(name):
    torch.manual_seed(0)
    return build_detector(Config.fromfile(CONFIGS / f'digits/{name}.py'))


# --- acmix


@pytest.mark.parametrize('shape', [(16, 64, 3, 6), (1, 64, 1, 1),
                                   (1, 64, 2, 9), (1, 64, 7, 1)], ids=str)
def test_f01_reflection_is_defined_on_tiny_maps(shape):
    layer = build(ACmix2d, 64)
    x = torch.randn(shape, requires_grad=True)
    out = layer(x)
    assert out.shape == shape
    out.square().sum().backward()
    for name, value in (('out', out), ('x', x.grad),
                        *((n, p.grad) for n, p in layer.named_parameters())):
        assert value.isfinite().all(), name


@pytest.mark.parametrize('dilation', [1, 2])
def test_f01_every_map_up_to_four_pixels_is_reflected(dilation):
    layer = build(ACmix2d, 4, num_heads=2, dilation=dilation)
    for size in itertools.product(range(1, 5), repeat=2):
        assert_equals_loops(layer, rand(1, 4, *size))


def test_f02_position_of_another_argument_is_refused():
    with pytest.raises(TypeError, match='positional argument'):
        ACmix2d(64, 64, 3, 1, 1, 1, 1, True, 1024)


@both_layers
@pytest.mark.parametrize('value', [1024, 0, 8, -7])
def test_f02_even_and_non_positive_extents_are_refused(cls, value):
    with pytest.raises(ValueError, match=f'attn_kernel_size must .*{value}'):
        build(cls, 64, attn_kernel_size=value)


@both_layers
@pytest.mark.parametrize('dtype, device', [
    (torch.bfloat16, 'cpu'), (torch.float64, 'cpu'), (torch.float16, 'cpu'),
    pytest.param(torch.float16, 'cuda', marks=gpu),
    pytest.param(torch.bfloat16, 'cuda', marks=gpu)], ids=str)
def test_f04_converted_layer_returns_the_type_of_its_input(cls, dtype,
                                                           device):
    layer = build(cls, 64)
    x = torch.randn(1, 64, 9, 7)
    expected = layer(x).double()
    out = layer.to(device, dtype)(x.to(device, dtype))
    assert out.dtype == dtype and out.device.type == device
    assert_close(out.double().cpu(), expected, rtol=.1, atol=.1)


@pytest.mark.parametrize('name', [
    'retinanet-acmix_r18-acmix_fpn-acmix_digits',
    'retinanet-sasa_r18-sasa_fpn-sasa_digits'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64], ids=str)
def test_f04_whole_detector_converts_for_validation(name, dtype):
    model = detector(name).eval().to(dtype)
    with torch.no_grad():
        maps = model(torch.rand(1, 3, 64, 48).to(dtype), mode='tensor')
    for x in (*maps[0], *maps[1]):
        assert x.dtype == dtype and x.isfinite().all()


@pytest.mark.parametrize('make', [
    *(lambda cls=cls, kw=kw: build(cls, 64, **kw) for cls, kw in (
        (ACmix2d, {}), (ACmix2d, dict(conv_kernel_size=5)),
        (StandAloneSelfAttention2d, {}),
        (StandAloneSelfAttention2d, dict(position='absolute')))),
    lambda: SASAStem2d(64, 64)
], ids=['acmix', 'acmix-k5', 'sasa', 'absolute', 'stem'])
def test_f05_everything_moves_with_the_module(make):
    layer = make()
    keys = set(layer.state_dict())
    on_meta = layer.to('meta')(torch.empty(1, 64, 8, 8, device='meta'))
    assert on_meta.device.type == 'meta' and on_meta.shape == (1, 64, 8, 8)
    layer = make().double()
    layer(rand(1, 64, 8, 8))
    assert set(layer.state_dict()) == keys  # nothing made by the forward
    for module in layer.modules():
        assert not [k for k, v in vars(module).items()
                    if isinstance(v, torch.Tensor)]
    for x in (*layer.parameters(), *layer.buffers()):
        assert x.dtype == torch.float64


@pytest.mark.parametrize('name', [
    'retinanet-acmix_r18-acmix_fpn-acmix_digits',
    'retinanet-sasa_r18-sasa_fpn-sasa_digits'])
def test_f05_whole_detector_moves(name):
    model = detector(name).to('meta').eval()
    maps = model(torch.empty(1, 3, 64, 48, device='meta'), mode='tensor')
    assert all(x.device.type == 'meta' for x in (*maps[0], *maps[1]))


def test_f08_dilation_two_keeps_the_size_and_equals_loops():
    layer = build(ACmix2d, 64, dilation=2)
    x = rand(1, 64, 16, 15)
    assert layer.double()(x).shape == (1, 64, 16, 15)
    assert_equals_loops(layer, x)


@pytest.mark.parametrize('dilation', [2, 3])
@pytest.mark.parametrize('cls, stride', [(StandAloneSelfAttention2d, 1),
                                         (ACmix2d, 1), (ACmix2d, 2)])
def test_f08_every_dilation_equals_loops(cls, stride, dilation):
    layer = build(cls, 8, num_heads=2, attn_kernel_size=3, stride=stride,
                  dilation=dilation)
    assert_equals_loops(layer, rand(1, 8, 7, 5))


@pytest.mark.parametrize('cls', [SASAResNet, ACmixResNet])
def test_f08_dilated_stage_of_a_backbone_gets_its_dilation(cls):
    model = cls(26, base_channels=16, strides=(1, 2, 2, 1),
                dilations=(1, 1, 1, 2), norm_eval=True).eval()
    assert model.layer4[0].conv2.dilation == (2, 2)
    assert model.layer3[0].conv2.dilation == (1, 1)
    outs = model(torch.rand(1, 3, 64, 96))
    assert outs[3].shape[2:] == outs[2].shape[2:] == (4, 6)


def test_f09_attention_is_the_same_with_every_convolution_kernel():
    x = torch.randn(1, 32, 10, 9)
    state, outs = None, []
    for kernel in (1, 3, 5):
        layer = build(ACmix2d, 32, conv_kernel_size=kernel)
        state = state or layer.state_dict()
        layer.load_state_dict(
            {k: v for k, v in state.items()
             if k not in ('fc_weight', 'shift_weight')}, strict=False)
        assert layer(x).shape == (1, 32, 10, 9)
        nn.init.zeros_(layer.beta)
        outs.append(layer(x))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize('kernel', [1, 3, 5, 7])
def test_f09_every_odd_kernel_equals_loops(kernel):
    layer = build(ACmix2d, 4, num_heads=2, conv_kernel_size=kernel,
                  attn_kernel_size=3)
    assert_equals_loops(layer, rand(1, 4, 6, 5))


@pytest.mark.parametrize('make', [
    lambda: build(ACmix2d, 64, 30), lambda: build(
        StandAloneSelfAttention2d, 64, 30), lambda: SASAStem2d(3, 30),
    lambda: SASAFPN([8, 8], 30, 2, attn_cfg=dict(num_heads=4)),
    lambda: ACmixFPN([8, 8], 30, 2),
    lambda: SASARetinaHead(3, 16, feat_channels=30,
                           attn_cfg=dict(num_heads=4))
], ids=['acmix', 'sasa', 'stem', 'sasa-fpn', 'acmix-fpn', 'head'])
def test_f10_heads_that_do_not_divide_the_channels_are_named(make):
    with pytest.raises(ValueError, match='out_channels must be divisible by '
                       'num_heads, got out_channels=30, num_heads=4'):
        make()


@both_layers
def test_f10_the_way_out_works(cls):
    with pytest.raises(ValueError, match='num_heads=([0-9]+) would do') as e:
        build(cls, 64, 30)
    heads = int(str(e.value).split('num_heads=')[-1].split()[0])
    assert build(cls, 64, 30, num_heads=heads).num_heads == heads


def test_f11_released_keys_convert_without_a_bias_of_the_shifts():
    state = released_layer(c=8, heads=2)
    assert not any(key.startswith('dep_conv.b') for key in state)
    converted = convert_acmix(state)
    layer = ACmix2d(8, 8, 3, padding=1, bias=False, num_heads=2)
    result = layer.load_state_dict(converted, strict=False)
    assert result.missing_keys == result.unexpected_keys == []
    for stray in ('dep_conv.bias', 'stray'):
        with pytest.raises(ValueError, match=f'got {stray}'):
            convert_acmix({**state, stray: torch.zeros(8)})
    # a bias of the output is asked for, never lost or invented in silence
    with_bias = ACmix2d(8, 8, 3, padding=1, bias=True, num_heads=2)
    assert with_bias.bias.shape == (8, ) and layer.bias is None
    assert with_bias.load_state_dict(
        converted, strict=False).missing_keys == ['bias']


@pytest.mark.parametrize('kind', ['ACmix', 'SASA'])
def test_f13_conv_module_takes_the_layer(kind):
    module = ConvModule(16, 32, 3, stride=2, padding=1,
                        conv_cfg=dict(type=kind, num_heads=4),
                        norm_cfg=dict(type='BN'))
    assert isinstance(module.conv, AttentionConv2d)
    assert module(torch.randn(2, 16, 9, 7)).shape == (2, 32, 5, 4)


@pytest.mark.parametrize('cls', [ACmixResNet, SASAResNet])
@pytest.mark.parametrize('depth', [18, 34])
def test_f13_basic_blocks_take_the_layer(cls, depth):
    model = cls(depth, base_channels=16)
    for stage in model.res_layers:
        for block in getattr(model, stage):
            assert isinstance(block.conv1, AttentionConv2d)
            assert isinstance(block.conv2, AttentionConv2d)
    outs = model(torch.rand(2, 3, 33, 50))
    assert [x.shape[1] for x in outs] == [16, 32, 64, 128]


@pytest.mark.parametrize('kind', ['acmix', 'sasa'])
def test_f14_start_values_survive_init_weights_in_every_slot(kind):
    model = detector(f'retinanet-{kind}_r18-{kind}_fpn-{kind}_digits')
    model.init_weights()
    slots = set()
    for name, m in model.named_modules():
        if isinstance(m, AttentionConv2d):
            slots.add(name.split('.')[0])
        if isinstance(m, ACmix2d):
            eye = torch.eye(9).view(9, 3, 3)
            assert torch.equal(m.shift_weight,
                               eye.expand_as(m.shift_weight)), name
            assert m.alpha.item() == m.beta.item() == 0.5, name
        if isinstance(m, StandAloneSelfAttention2d):
            for x in (m.rel_pos_h, m.rel_pos_w):
                assert 0.6 < x.std() < 1.4, name
    assert slots == {'backbone', 'neck', 'bbox_head'}


# --- api


@pytest.mark.parametrize('make', [
    lambda cfg: SASAFPN([8], 16, 1, attn_cfg=dict(type='SASA', **cfg)),
    lambda cfg: ACmixFPN([8], 16, 1, attn_cfg=cfg),
    lambda cfg: SASAResNet(26, attn_cfg=cfg),
    lambda cfg: ACmixResNet(26, attn_cfg=cfg),
    lambda cfg: SASARetinaHead(3, 16, attn_cfg=cfg),
], ids=['sasa-fpn', 'acmix-fpn', 'sasa-resnet', 'acmix-resnet', 'head'])
@pytest.mark.parametrize('key', ['kernel_att', 'num_head', 'kernel_size'])
def test_f19_unknown_key_is_named_with_the_accepted_ones(make, key):
    with pytest.raises((TypeError, ValueError), match=key) as caught:
        make({key: 7})
    for accepted in ('num_heads', 'attn_kernel_size', 'padding_mode'):
        assert accepted in str(caught.value)


@pytest.mark.parametrize('make', [
    lambda cfg: build_conv_layer(dict(type='SASA', **cfg), 16, 16, 3,
                                 padding=1),
    lambda cfg: ConvModule(16, 16, 3, padding=1,
                           conv_cfg=dict(type='ACmix', **cfg)),
    lambda cfg: SASAResNet(26, attn_stem=cfg),
], ids=['conv-layer', 'conv-module', 'stem'])
def test_f19_unknown_key_is_named_in_every_other_slot(make):
    with pytest.raises((TypeError, ValueError), match='kernel_att'):
        make(dict(kernel_att=7))


@pytest.mark.parametrize('backend', BACKENDS)
def test_f33_even_extent_is_refused_by_layer_and_function(backend):
    for cls in LAYERS:
        with pytest.raises(ValueError, match='attn_kernel_size.*8'):
            build(cls, attn_kernel_size=8, backend=backend)
    q = torch.randn(1, 2, 4, 9, 9)
    with pytest.raises(ValueError, match='attn_kernel_size.*8'):
        local_attention(q, q, q, 8, backend=backend)


# --- sasa


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('cls', LAYERS)
def test_f22_each_head_has_its_own_map(cls, backend):
    layer = build(cls, 8, num_heads=2, backend=backend)
    if cls is ACmix2d:
        nn.init.zeros_(layer.beta)
    x = torch.randn(1, 8, 6, 6)
    before = layer(x)
    with torch.no_grad():
        layer.in_proj_weight[:4] *= 3
    after = layer(x)
    assert torch.equal(after[:, 4:], before[:, 4:])
    assert not torch.isclose(after[:, :4], before[:, :4], 0, 1e-6).all(
        1).any()


@both_layers
def test_f23_stride_gives_the_size_of_the_convolution(cls):
    layer = build(cls, 16, 32, stride=2)
    x = torch.randn(1, 16, 9, 7)
    assert layer(x).shape == (1, 32, 5, 4)
    dense = build(cls, 16, 32)
    dense.load_state_dict(layer.state_dict())
    if cls is ACmix2d:  # the strided convolution it replaces skips pixels
        expected = dense(x)[..., ::2, ::2]
    else:
        expected = F.avg_pool2d(dense(x), 2, 2, ceil_mode=True)
    assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('mixtures', [1, 4])
@pytest.mark.parametrize('size', [(32, 40), (30, 37), (1, 1), (3, 5)],
                         ids=str)
def test_f26_attention_stem_takes_three_channels(mixtures, size):
    model = SASAResNet(26, attn_stem=dict(num_mixtures=mixtures)).eval()
    assert model.conv1.in_channels == 3 and model.conv1.num_heads == 4
    x = model.maxpool(model.relu(model.norm1(model.conv1(
        torch.rand(1, 3, *size)))))
    assert x.shape == (1, 64, -(-size[0] // 4), -(-size[1] // 4))


def test_f26_convolution_stem_is_the_default():
    assert isinstance(SASAResNet(26, base_channels=16).conv1, nn.Conv2d)
    assert SASAStem2d(3, 16).num_mixtures == 4
    assert 'num_mixtures (int)' in SASAStem2d.__doc__
    assert 'Defaults to 4' in SASAStem2d.__doc__


# --- sizes


def test_f27_rows_and_columns_are_not_swapped():
    layer = build(StandAloneSelfAttention2d).double()
    other = build(StandAloneSelfAttention2d).double()
    # of the channels of a head, the first half belongs to the rows
    swap = torch.arange(16).view(4, 2, 2).flip(1).flatten()
    with torch.no_grad():
        q, k, v = layer.in_proj_weight.split(16)
        other.in_proj_weight.copy_(torch.cat([q[swap], k[swap], v]))
        other.rel_pos_h.copy_(layer.rel_pos_w)
        other.rel_pos_w.copy_(layer.rel_pos_h)
    x = rand(1, 16, 8, 10)
    assert_close(other(x.transpose(2, 3)), layer(x).transpose(2, 3))
    # nor are their names
    assert_equals_loops(layer, rand(1, 16, 4, 6))


@pytest.mark.parametrize('stride', [1, 2])
def test_f27_acmix_does_not_swap_them_either(stride):
    layer, other = (build(ACmix2d, stride=stride).double() for _ in range(2))
    with torch.no_grad():
        layer.shift_weight.normal_()
        other.shift_weight.copy_(layer.shift_weight.transpose(-1, -2))
        other.pos_weight.copy_(layer.pos_weight.flip(1))
    x = rand(1, 16, 8, 10)
    assert_close(other(x.transpose(2, 3)), layer(x).transpose(2, 3))


@both_layers
@pytest.mark.parametrize('channels, size', [
    (32, (21, 16)), (4, (100, 168)), (4, (50, 84)), (4, (25, 42)),
    (4, (13, 21)), (4, (7, 11))], ids=str)
def test_f29_no_size_has_to_be_divisible(cls, channels, size):
    layer = build(cls, channels)
    out = layer(torch.randn(1, channels, *size))
    assert out.shape == (1, channels, *size) and out.isfinite().all()


@both_layers
@pytest.mark.parametrize('size', [(8, 5, 40), (8, 1, 1), (8, 3, 2)], ids=str)
def test_f34_dilated_neighborhood_larger_than_the_map_is_legal(cls, size):
    layer = build(cls, 8, num_heads=1, dilation=4)
    x = torch.randn(1, *size, requires_grad=True)
    out = layer(x)
    out.square().sum().backward()
    assert out.shape == x.shape
    assert out.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize('backend', ['torch', 'auto'])
@pytest.mark.parametrize('padding_mode', PADDING_MODES)
def test_f34_every_backend_equals_the_reference(backend, padding_mode):
    q, k, v = rand(3, 1, 2, 8, 5, 40)
    options = dict(dilation=4, padding_mode=padding_mode)
    out = local_attention(q, k, v, 7, backend=backend, **options)
    expected = local_attention(q, k, v, 7, backend='reference', **options)
    assert expected.isfinite().all()
    assert_close(out, expected, rtol=1e-10, atol=1e-10)


@both_layers
@pytest.mark.parametrize('size', [(2, 9), (9, 2), (1, 9), (9, 1)], ids=str)
def test_f35_map_degenerate_in_one_direction_equals_loops(cls, size):
    assert_equals_loops(build(cls), rand(1, 16, *size))


# --- borders


@both_layers
@pytest.mark.parametrize('backend', BACKENDS)
def test_f30_output_depends_on_the_input_and_on_its_neighborhood_only(
        cls, backend):
    layer = build(cls, backend=backend, padding_mode='mask')
    first, second = torch.randn(2, 1, 16, 6, 6)
    assert (layer(first) != layer(second)).all()
    before = layer(first)
    changed = first.clone()
    changed[..., 4:, :] = changed[..., 4:] = 1e6
    # the neighborhood of the corner ends at row and column 3
    assert torch.equal(layer(changed)[..., 0, 0], before[..., 0, 0])
    assert (layer(changed)[..., 4, 4] != before[..., 4, 4]).all()


@pytest.mark.parametrize('backend', BACKENDS)
def test_f30_mask_gives_no_weight_outside_the_image(backend):
    q, k, _ = rand(3, 1, 2, 4, 6, 6)
    out = local_attention(q, k, torch.ones_like(q), 7, backend=backend)
    assert_close(out, torch.ones_like(out), rtol=0, atol=1e-14)


@pytest.mark.parametrize('backend', BACKENDS)
def test_f31_border_rules_differ_at_the_border_alone(backend):
    outs = {}
    for mode in PADDING_MODES:
        layer = build(StandAloneSelfAttention2d, 8, padding_mode=mode,
                      backend=backend).double()
        with torch.no_grad():
            layer.in_proj_weight[16:] = torch.eye(8)
        outs[mode] = layer(torch.ones(1, 8, 9, 9, dtype=torch.float64))
    ones = torch.ones_like(outs['mask'])
    assert_close(outs['mask'], ones)
    assert_close(outs['reflect'], ones)
    for y, x in itertools.product((0, -1), repeat=2):
        assert (outs['zeros'][..., y, x] < 0.999).all()
    for mode in PADDING_MODES:
        assert_close(outs[mode][..., 3:-3, 3:-3], ones[..., 3:-3, 3:-3])
    x = rand(1, 8, 9, 9)
    layers = [build(StandAloneSelfAttention2d, 8, padding_mode=mode,
                    backend=backend).double() for mode in PADDING_MODES]
    inner = [layer(x)[..., 3:-3, 3:-3] for layer in layers]
    assert_close(inner[1], inner[0])
    assert_close(inner[2], inner[0])


def test_f69_zero_padding_reaches_sasa_only_near_the_border():
    layer = build(StandAloneSelfAttention2d, 8).double()
    x = rand(1, 8, 20, 20)
    padded, alone = layer(F.pad(x, (0, 12))), layer(x)
    assert_close(padded[..., :17], alone[..., :17], rtol=1e-12, atol=1e-12)
    assert not torch.isclose(padded[..., 17:20], alone[..., 17:20]).any()


def test_f69_padding_moves_the_coordinates_of_acmix_by_a_known_amount():
    layer = build(ACmix2d, 8).double()
    x = rand(1, 8, 20, 20)

    def difference():
        padded, alone = layer(F.pad(x, (0, 12))), layer(x)
        change = (padded[..., :17] - alone[..., :17]).square().mean().sqrt()
        return (change / alone.std()).item()

    # regression value: 1 % of the output's spread
    assert difference() == pytest.approx(0.0095, rel=0.05)
    nn.init.zeros_(layer.pos_weight)
    assert difference() < 1e-12  # nothing but the coordinates

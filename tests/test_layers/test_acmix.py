import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mmcv.cnn import build_conv_layer
from torch.testing import assert_close

from acmix_det.checkpoints import convert_acmix
from acmix_det.layers import ACmix2d

DATA = Path(__file__).parents[1] / 'data'


def build(in_channels=16, out_channels=16, stride=1, kernel_size=3, padding=1,
          dilation=1, bias=False, **kwargs):
    torch.manual_seed(0)
    kwargs = {'num_heads': 4, 'attn_kernel_size': 7, **kwargs}
    return ACmix2d(in_channels, out_channels, kernel_size, stride, padding,
                   dilation, bias=bias, **kwargs).double()


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def branches(layer, x):
    """Outputs of the attention path and the convolution path alone."""
    with torch.no_grad():
        alpha, beta = layer.alpha.item(), layer.beta.item()
        layer.beta.zero_(), layer.alpha.fill_(1.)
        attention = layer(x)
        layer.alpha.zero_(), layer.beta.fill_(1.)
        convolution = layer(x)
        layer.alpha.fill_(alpha), layer.beta.fill_(beta)
    return attention, convolution


@pytest.mark.parametrize('backend', ['reference', 'torch'])
@pytest.mark.parametrize('path', sorted(DATA.glob('acmix_layer_*.npz')),
                         ids=lambda p: p.stem[len('acmix_layer_'):])
def test_released_layer_and_its_gradients_come_out(path, backend):
    data = np.load(path)
    config = json.loads(str(data['config']))
    tensors = {k: torch.from_numpy(data[k]) for k in data.files
               if k != 'config'}
    layer = build_conv_layer(
        dict(type='ACmix', num_heads=config['num_heads'],
             attn_kernel_size=config['kernel_att'], backend=backend),
        config['in_channels'], config['out_channels'], kernel_size=3,
        stride=config['stride'], padding=1, bias=False).double()

    def released(start):
        return convert_acmix({k[len(start):]: x for k, x in tensors.items()
                              if k.startswith(start)})

    result = layer.load_state_dict(released('param.'))
    assert not result.missing_keys and not result.unexpected_keys
    x = tensors['x'].requires_grad_()
    y = layer(x)
    y.backward(tensors['gy'])

    def assert_relative(actual, expected, name):
        error = (actual - expected).abs().max()
        assert error <= 1e-9 * expected.abs().max().clamp(min=1e-3), name

    assert_relative(y.detach(), tensors['y'], 'y')
    assert_relative(x.grad, tensors['gx'], 'gx')
    for name, grad in released('grad.').items():
        assert_relative(getattr(layer, name).grad, grad, name)


def test_branches_mix_with_alpha_and_beta():
    layer = build(bias=True)
    x = rand(1, 16, 6, 5)
    attention, convolution = branches(layer, x)
    with torch.no_grad():
        layer.alpha.fill_(0.3), layer.beta.fill_(-2.)
    assert_close(layer(x), 0.3 * attention - 2 * convolution)
    assert attention.abs().mean() > 0.1 and convolution.abs().mean() > 0.1


def test_fresh_shift_kernels_move_the_image_by_one_pixel():
    layer = build(out_channels=8, num_heads=2)
    x = rand(1, 16, 6, 5)
    torch.nn.init.normal_(layer.in_proj_bias)
    q, k, v = torch.nn.functional.conv2d(
        x, layer.in_proj_weight[:, :, None, None], layer.in_proj_bias).view(
            3, 2, 4, 6, 5)
    for tap, (dy, dx) in enumerate(
        (dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)):
        with torch.no_grad():
            layer.fc_weight.zero_()
            layer.fc_weight[tap, 2] = 1.  # keys of head 0
        _, convolution = branches(layer, x)
        padded = torch.nn.functional.pad(k[0], (1, 1, 1, 1))
        moved = padded[:, 1 + dy:7 + dy, 1 + dx:6 + dx]
        # output channels are ordered [D, N]; both heads see the same sum
        expected = moved[:, None].expand(-1, 2, -1, -1).reshape(1, 8, 6, 5)
        assert_close(convolution, expected)


def test_position_terms_equal_the_published_formula():
    # logits D^-1/2 q_i . (k_j + p_i - p_j), the published form
    layer = build(out_channels=4, num_heads=1, attn_kernel_size=3)
    torch.nn.init.normal_(layer.pos_bias)
    x = rand(1, 16, 3, 4)
    q, k, v = torch.nn.functional.conv2d(
        x, layer.in_proj_weight[:, :, None, None],
        layer.in_proj_bias).view(3, 4, 3, 4).detach()
    weight, bias = layer.pos_weight.detach(), layer.pos_bias.detach()

    def p(y, x_):
        place = torch.tensor([-1 + x_ * 2 / 3, -1 + y * 2 / 2],
                             dtype=torch.float64)
        return weight @ place + bias

    y, x_ = 1, 2
    logits, values = [], []
    for i in (0, 1, 2):
        for j in (1, 2, 3):
            logits.append(0.5 * q[:, y, x_] @ (k[:, i, j] + p(y, x_) -
                                               p(i, j)))
            values.append(v[:, i, j])
    expected = torch.stack(logits).softmax(0) @ torch.stack(values)
    attention, _ = branches(layer, x)
    assert_close(attention[0, :, y, x_], expected)


@pytest.mark.parametrize('conv_kernel_size', [1, 3, 5])
@pytest.mark.parametrize('stride', [1, 2])
def test_any_odd_convolution_path_keeps_the_size(conv_kernel_size, stride):
    layer = build(16, 32, stride, conv_kernel_size=conv_kernel_size)
    assert layer(rand(1, 16, 10, 9)).shape == (1, 32, -(-10 // stride),
                                               -(-9 // stride))


def test_attention_path_does_not_depend_on_the_convolution_kernel():
    x, outs = rand(1, 16, 10, 9), []
    state = build().state_dict()
    for kernel in (1, 3, 5):
        layer = build(conv_kernel_size=kernel)
        layer.load_state_dict(
            {k: v for k, v in state.items()
             if k not in ('fc_weight', 'shift_weight')}, strict=False)
        outs.append(branches(layer, x)[0])
    assert_close(outs[1], outs[0], rtol=0, atol=0)
    assert_close(outs[2], outs[0], rtol=0, atol=0)


def test_replaced_kernel_is_that_of_the_convolution_path():
    layer = build(kernel_size=5, padding=2)
    assert layer.shift_weight.shape == (1, 16, 25, 5, 5)


def test_dilation_spreads_both_paths():
    layer = build(dilation=2, padding=2)
    dense = build()
    dense.load_state_dict(layer.state_dict())
    x = rand(1, 16, 16, 15)
    torch.nn.init.zeros_(layer.pos_weight)
    torch.nn.init.zeros_(dense.pos_weight)
    torch.nn.init.zeros_(layer.in_proj_bias)
    torch.nn.init.zeros_(dense.in_proj_bias)
    # every second pixel is a map of its own under dilation 2
    assert layer(x).shape == x.shape
    attention, convolution = branches(layer, x)
    for y in (0, 1):
        for x_ in (0, 1):
            part = branches(dense, x[..., y::2, x_::2])
            assert_close(convolution[..., y::2, x_::2], part[1])
            inner = part[0][..., 3:-3, 3:-3]  # reflection differs outside
            assert_close(attention[..., y::2, x_::2][..., 3:-3, 3:-3], inner)


def test_several_sets_of_shift_kernels_are_averaged():
    one, two = build(), build(num_shift_sets=2)
    two.load_state_dict({k: v for k, v in one.state_dict().items()
                         if k != 'shift_weight'}, strict=False)
    x = rand(1, 16, 6, 5)
    assert_close(two(x), one(x))
    with torch.no_grad():
        two.shift_weight.copy_(rand(*two.shift_weight.shape))
        one.shift_weight.copy_(two.shift_weight.mean(0, keepdim=True))
    assert_close(two(x), one(x))
    assert two.shift_weight.numel() == 2 * one.shift_weight.numel()


def test_start_values():
    layer = build(32, 64, num_shift_sets=2)
    eye = torch.eye(9, dtype=torch.float64).view(9, 3, 3)
    assert torch.equal(layer.shift_weight, eye.expand(2, 64, -1, -1, -1))
    assert layer.alpha.item() == layer.beta.item() == 0.5
    attention, convolution = branches(layer, rand(4, 32, 20, 20))
    assert 0.3 < convolution.std() < 3


@pytest.mark.parametrize('change, error, message', [
    (dict(conv_kernel_size=2), ValueError,
     'conv_kernel_size must be odd, got 2'),
    (dict(conv_kernel_size=0), ValueError,
     'conv_kernel_size must be positive, got 0'),
    (dict(conv_kernel_size=33), ValueError,
     'conv_kernel_size must be at most 31, got 33'),
    (dict(num_shift_sets=1.5), TypeError,
     'num_shift_sets must be an int, got 1.5'),
    (dict(position='relative'), TypeError, 'position'),
])
def test_bad_arguments_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        build(**change)

"""Layers with random and hostile arguments.

Either the constructor says which argument is wrong and what it got, or the
layer computes a map of the convolution's size.
"""
import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from acmix_det.layers import ACmix2d, SASAStem2d, StandAloneSelfAttention2d
from acmix_det.layers.patchwise import (ACmixPatchwiseAttention2d,
                                        PatchwiseAttention2d)
from tests.test_fuzz.hostile import HOSTILE, assert_names_one_of, examples

BACKENDS = ('auto', 'reference', 'torch', 'cpu')
PADDING_MODES = ('mask', 'zeros', 'reflect')
CONV = dict(
    in_channels=[1, 3, 8, 16],
    out_channels=[4, 8, 12, 16],
    kernel_size=[3, (3, 3), [5, 5], 7],
    stride=[1, 2, (3, 3)],
    dilation=[1, 2, (3, 3)],
    groups=[1],
    bias=[True, False],
    num_heads=[1, 2, 4],
    attn_kernel_size=[1, 3, 7, 9],
    padding_mode=PADDING_MODES,
    backend=BACKENDS,
    with_cp=[True, False])
PATCHWISE = dict(
    in_channels=[1, 3, 16],
    rel_channels=[1, 2, 4],
    out_channels=[8, 16],
    attn_kernel_size=[1, 3, 5],
    norm_cfg=[dict(type='BN'), dict(type='SyncBN'),
              dict(type='BN', requires_grad=False)],
    share_planes=[1, 4, 8])
MIX = dict(conv_kernel_size=[1, 3, 5], num_shift_sets=[1, 2])
# arguments and values that are fine together
LAYERS = {
    StandAloneSelfAttention2d: dict(
        CONV, position=['relative', 'absolute', 'none'],
        use_key=[True], value_init_std=[None, 0.01, 2]),
    ACmix2d: dict(CONV, conv_kernel_size=[None, 1, 3, 5],
                  num_shift_sets=[1, 2]),
    SASAStem2d: dict(
        in_channels=[1, 3], out_channels=[2, 8, 12], num_heads=[1, 2],
        num_mixtures=[1, 4], block_size=[1, 2, 4, 5]),
    PatchwiseAttention2d: PATCHWISE,
    ACmixPatchwiseAttention2d: dict(PATCHWISE, **MIX),
}


def kept_padding(arguments):
    """The padding that keeps the size, if there is one."""
    kernel, dilation = (
        x[0] if isinstance(x, (tuple, list)) and x else x
        for x in (arguments['kernel_size'], arguments['dilation']))
    try:
        return dilation * (kernel // 2)
    except (TypeError, ValueError, OverflowError):
        return 1


@st.composite
def arguments_of(draw, cls, hostile):
    """Arguments of a layer, ``hostile`` of them replaced; and these."""
    values = LAYERS[cls]
    arguments = {
        name: draw(st.sampled_from(choices), label=name)
        for name, choices in values.items()
    }
    names = [*values, 'padding'] if 'kernel_size' in values else [*values]
    bad = {
        draw(st.sampled_from(names)): draw(st.sampled_from(HOSTILE))
        for _ in range(hostile)
    }
    arguments.update(bad)
    if 'padding' in names and 'padding' not in bad:
        arguments['padding'] = kept_padding(arguments)
    return arguments, bad


def build(cls, arguments):
    """A layer in double precision, in training."""
    torch.manual_seed(0)
    arguments = dict(arguments)
    norm = arguments.get('norm_cfg')
    if isinstance(norm, dict) and norm.get('type') == 'SyncBN':
        arguments['norm_cfg'] = dict(type='BN')
    return cls(**arguments)


def check(layer, stride, batch, height, width):
    """Forward, backward and state dict of a layer that was built."""
    x = torch.randn(batch, layer.in_channels, height, width,
                    requires_grad=True)
    out = layer(x)
    assert out.shape == (batch, layer.out_channels, math.ceil(height / stride),
                         math.ceil(width / stride))
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    for name, p in layer.named_parameters():
        if p.requires_grad:
            assert p.grad is not None and p.grad.isfinite().all(), name
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    for p in layer.parameters():
        p.data.add_(1)
    layer.load_state_dict(state)
    layer.eval()
    assert torch.equal(layer(x), layer(x.detach()))
    repr(layer)


sizes = st.tuples(st.integers(0, 3), st.integers(1, 19), st.integers(1, 19))


@examples(100)
@given(st.data(), st.sampled_from(list(LAYERS)), sizes)
def test_layers_with_random_arguments_stand_in_for_convolutions(
        data, cls, size):
    arguments, _ = data.draw(arguments_of(cls, 0))
    layer = build(cls, arguments)
    if 'norm_cfg' in arguments and size[0] * size[1] * size[2] < 2:
        return  # no statistics
    stride = 1
    if 'kernel_size' in arguments:
        stride = layer.stride[0]
        conv = nn.Conv2d(*(getattr(layer, name) for name in (
            'in_channels', 'out_channels', 'kernel_size', 'stride', 'padding',
            'dilation')))
        x = torch.zeros(1, layer.in_channels, *size[1:])
        assert conv(x).shape[2:] == tuple(
            math.ceil(n / stride) for n in size[1:])
    check(layer, stride, *size)


@examples(400)
@given(st.data(), st.sampled_from(list(LAYERS)), st.integers(1, 2), sizes)
def test_layers_name_a_bad_argument_or_work(data, cls, count, size):
    arguments, bad = data.draw(arguments_of(cls, count))
    try:
        layer = build(cls, arguments)
    except (TypeError, ValueError) as error:
        assert_names_one_of(error, bad)
        return
    if 'norm_cfg' in arguments and size[0] * size[1] * size[2] < 2:
        return
    stride = layer.stride[0] if 'kernel_size' in arguments else 1
    check(layer, stride, *size)

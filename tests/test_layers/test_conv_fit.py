"""Attention layers that imitate a convolution."""
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from acmix_det.layers import ACmix2d, StandAloneSelfAttention2d
from acmix_det.layers.conv_fit import (expected_relu, low_rank_groups,
                                       padded_log, separable_fit)


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def compose(fit):
    """Kernels of a low-rank fit, (Cout, taps, Cin)."""
    return torch.einsum('gotr,grc->gotc', fit.left, fit.right).flatten(0, 1)


@pytest.mark.parametrize('rank', [2, 9, 40])
def test_low_rank_error_is_the_error_of_the_kernels(rank):
    weight = torch.randn(16, 12, 3, 3, dtype=torch.float64)
    fit = low_rank_groups(weight, 4, rank)
    target = weight.flatten(2).transpose(1, 2)
    assert relative(compose(fit), target) == pytest.approx(fit.error,
                                                           abs=1e-12)
    assert (fit.error < 1e-12) == (rank >= 12)


def test_separable_maps_are_found_exactly():
    rows = torch.tensor([[1., 2., 1.], [0., 0., 1.]], dtype=torch.float64)
    cols = torch.tensor([[1., 3., 4.], [1., 0., 0.]], dtype=torch.float64)
    value = torch.randn(6, 5, dtype=torch.float64)
    heads = torch.arange(6) // 3
    weight = torch.einsum('oc,oy,ox->ocyx', value, rows[heads], cols[heads])
    fit = separable_fit(weight, 2)
    assert fit.error < 1e-6
    torch.testing.assert_close(fit.rows, rows / rows.sum(1, keepdim=True))
    torch.testing.assert_close(fit.cols, cols / cols.sum(1, keepdim=True))
    rebuilt = torch.einsum('oc,oy,ox->ocyx', fit.value, fit.rows[heads],
                           fit.cols[heads])
    torch.testing.assert_close(rebuilt, weight)


def test_separable_error_is_the_error_of_the_kernels():
    weight = torch.randn(8, 3, 3, 3, dtype=torch.float64)
    fit = separable_fit(weight, 4)
    heads = torch.arange(8) // 2
    rebuilt = torch.einsum('oc,oy,ox->ocyx', fit.value, fit.rows[heads],
                           fit.cols[heads])
    assert relative(rebuilt, weight) == pytest.approx(fit.error, abs=1e-9)
    assert (fit.rows >= 0).all() and (fit.cols >= 0).all()


def test_expected_relu_matches_samples():
    mean, std = torch.tensor([-1., 0., 2.]), torch.tensor([1., 2., 0.])
    sample = (mean + std * torch.randn(200_000, 3)).relu().mean(0)
    torch.testing.assert_close(expected_relu(mean, std), sample, atol=0.02,
                               rtol=0)


def test_expected_relu_of_a_constant_is_its_relu():
    mean = torch.tensor([-2., 0., 3.])
    torch.testing.assert_close(expected_relu(mean, torch.zeros(3)),
                               mean.relu())


def test_padded_log_gives_the_weights_back():
    weights = torch.tensor([[0.2, 0.5, 0.3], [0., 1., 0.]])
    logits = padded_log(weights, 7, floor=1e-4)
    assert logits.shape == (2, 7)
    assert logits.min() == pytest.approx(math.log(1e-4))
    torch.testing.assert_close(
        logits.softmax(1)[:, 2:5], weights, atol=1e-3, rtol=0)


@pytest.mark.parametrize('heads, in_channels, stride', [
    (4, 32, 1), (4, 8, 2), (2, 16, 1), (1, 8, 1)])
def test_acmix_imitates_up_to_the_error_that_it_tells(heads, in_channels,
                                                      stride):
    conv = nn.Conv2d(in_channels, 16, 3, stride, 1, bias=False).double()
    layer = ACmix2d(in_channels, 16, 3, stride, 1, bias=False,
                    num_heads=heads, num_shift_sets=2).double()
    error = layer.imitate_conv(conv.weight)
    assert layer.alpha.item() == pytest.approx(0.1)
    layer.alpha.data.zero_()
    x = torch.randn(8, in_channels, 24, 24, dtype=torch.float64)
    # white noise sees the error of the kernels
    assert relative(layer(x), conv(x)) == pytest.approx(error, abs=0.02)
    if in_channels == 8 and heads == 4:
        assert error < 1e-12  # 9 maps hold 8 channels


def test_acmix_kernel_larger_than_the_convolution_is_padded():
    conv = nn.Conv2d(8, 16, 3, padding=1, bias=False).double()
    layer = ACmix2d(8, 16, 3, padding=1, bias=False,
                    conv_kernel_size=5).double()
    assert layer.imitate_conv(conv.weight) < 1e-12
    layer.alpha.data.zero_()
    x = torch.randn(1, 8, 6, 7, dtype=torch.float64)
    torch.testing.assert_close(layer(x), conv(x))
    small = ACmix2d(8, 16, 3, padding=1, conv_kernel_size=1)
    before = [p.clone() for p in small.parameters()]
    assert small.imitate_conv(conv.weight) is None
    assert all(map(torch.equal, before, small.parameters()))


def test_attention_path_of_a_warm_acmix_sees_every_channel():
    layer = ACmix2d(64, 16, 3, padding=1, bias=False)
    layer.imitate_conv(torch.randn(16, 64, 3, 3))
    # 9 maps are those of the convolution, 3 of the 12 stay random
    rank = torch.linalg.matrix_rank(layer.in_proj_weight.view(12, 4, 64)[:, 0])
    assert rank == 12


@pytest.mark.parametrize('use_key', [True, False])
def test_sasa_attends_to_the_taps_of_the_convolution(use_key):
    layer = StandAloneSelfAttention2d(32, 64, 3, padding=1, bias=False,
                                      use_key=use_key)
    rows = torch.tensor([0.3, 0.7, 0.2])
    weight = torch.randn(64, 32, 1, 1) * (rows[:, None] * rows.flip(0))
    error = layer.imitate_conv(weight)
    assert error < 1e-3
    x = torch.randn(2, 32, 20, 20).relu()
    inner = (..., slice(3, -3), slice(3, -3))
    expected = F.conv2d(x, weight, padding=1)
    assert relative(layer(x)[inner], expected[inner]) < 0.15


def test_query_follows_the_expected_input():
    layer = StandAloneSelfAttention2d(32, 64, 3, padding=1, bias=False)
    weight = torch.randn(64, 32, 1, 1) * torch.eye(3)[1] * torch.eye(3)[:, 2:]
    mean = torch.rand(32) * 5
    layer.imitate_conv(weight, mean)
    query = layer.in_proj_weight[:64] @ mean
    assert float(query.mean()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize('options', [
    dict(position='none'), dict(position='absolute'), dict(num_heads=64)],
    ids=['none', 'absolute', 'heads of one channel'])
def test_sasa_without_positions_of_its_own_stays_as_it_is(options):
    layer = StandAloneSelfAttention2d(32, 64, 3, padding=1, **options)
    before = [p.clone() for p in layer.parameters()]
    assert layer.imitate_conv(torch.randn(64, 32, 3, 3)) is None
    assert all(map(torch.equal, before, layer.parameters()))

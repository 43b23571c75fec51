import re

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from acmix_det.layers import SASAStem2d, StandAloneSelfAttention2d
from acmix_det.layers.sasa import sinusoidal_position


def build(in_channels=16, out_channels=16, stride=1, **kwargs):
    torch.manual_seed(0)
    kwargs = {'num_heads': 4, 'attn_kernel_size': 7, **kwargs}
    return StandAloneSelfAttention2d(
        in_channels, out_channels, 3, stride, 1, **kwargs).double()


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_layer_is_the_equation_of_the_paper():
    layer = build(out_channels=24, bias=True, attn_kernel_size=3)
    torch.nn.init.normal_(layer.bias)
    x = rand(1, 16, 4, 5)
    weights = layer.in_proj_weight.detach()
    q, k, v = torch.einsum('toc,chw->tohw', weights.view(3, 24, 16), x[0])
    expected = torch.zeros(24, 4, 5, dtype=torch.float64)
    for head in range(4):
        c = slice(head * 6, head * 6 + 6)
        for y in range(4):
            for x_ in range(5):
                logits, values = [], []
                for dy in (-1, 0, 1):
                    for dx in (-1, 0, 1):
                        if not (0 <= y + dy < 4 and 0 <= x_ + dx < 5):
                            continue
                        r = torch.cat([layer.rel_pos_h[head, :, dy + 1],
                                       layer.rel_pos_w[head, :, dx + 1]])
                        key = k[c, y + dy, x_ + dx]
                        logits.append(q[c, y, x_] @ (key + r.detach()))
                        values.append(v[c, y + dy, x_ + dx])
                p = torch.stack(logits).softmax(0)
                expected[c, y, x_] = p @ torch.stack(values)
    expected += layer.bias.detach()[:, None, None]
    assert_close(layer(x)[0], expected)


def test_stride_is_average_pooling_of_the_full_map():
    full, strided = build(bias=False), build(stride=2, bias=False)
    strided.load_state_dict(full.state_dict())
    x = rand(1, 16, 9, 7)
    assert strided(x).shape == (1, 16, 5, 4)
    assert_close(strided(x), F.avg_pool2d(full(x), 2, 2, ceil_mode=True))
    # the last window holds one row: its mean is of that row alone
    assert_close(strided(x)[..., 4, 0], full(x)[..., 8, :2].mean(-1))


def test_rows_and_columns_are_not_swapped():
    layer, transposed = build(), build()
    transposed.load_state_dict(layer.state_dict())
    d = layer.head_dim
    # channel order of a head: row half first; swap halves of q and k
    swap = torch.arange(16).view(4, 2, d // 2).flip(1).flatten()
    with torch.no_grad():
        q, k, v = layer.in_proj_weight.split(16)
        transposed.in_proj_weight.copy_(torch.cat([q[swap], k[swap], v]))
        transposed.rel_pos_h.copy_(layer.rel_pos_w)
        transposed.rel_pos_w.copy_(layer.rel_pos_h)
    x = rand(1, 16, 8, 10)
    assert_close(transposed(x.transpose(2, 3)), layer(x).transpose(2, 3))


def test_constant_image_stays_constant_with_mask_only():
    layer = build(bias=False)
    x = torch.ones(1, 16, 9, 9, dtype=torch.float64)
    out = layer(x)
    assert_close(out, out[..., 4:5, 4:5].expand_as(out))
    layer.padding_mode = 'zeros'
    out = layer(x)
    assert (out[..., 0, 0].abs() < out[..., 4, 4].abs()).all()


def test_zero_padding_of_the_image_reaches_only_the_neighborhood():
    layer = build(in_channels=8, out_channels=8, attn_kernel_size=7)
    x = rand(1, 8, 20, 20)
    padded = layer(F.pad(x, (0, 12)))
    assert_close(padded[..., :17], layer(x)[..., :17])
    assert not torch.allclose(padded[..., 17:20], layer(x)[..., 17:20])


def test_heads_have_their_own_attention():
    layer = build(in_channels=8, out_channels=8, num_heads=2)
    x = rand(1, 8, 6, 6)
    before = layer(x)
    with torch.no_grad():
        layer.in_proj_weight[:4] *= 3  # queries of head 0
    after = layer(x)
    assert torch.equal(after[:, 4:], before[:, 4:])
    assert (after[:, :4] != before[:, :4]).all()


def test_positions_none_and_absolute():
    x = torch.ones(1, 16, 6, 7, dtype=torch.float64)
    none = build(position='none', bias=False)
    assert {n for n, _ in none.named_parameters()} == {'in_proj_weight'}
    assert_close(none(x), none(x)[..., :1, :1].expand(1, 16, 6, 7))
    absolute = build(position='absolute', bias=False)
    absolute.load_state_dict(none.state_dict())
    out = absolute(x)
    assert (out.std((2, 3)) > 1e-3).all()
    assert_close(out, none(x + sinusoidal_position(x)))


def test_sinusoids_encode_row_and_column():
    position = sinusoidal_position(torch.zeros(1, 6, 4, 5,
                                               dtype=torch.float64))
    assert position.shape == (6, 4, 5) and position.dtype == torch.float64
    y = torch.arange(4.).double()[:, None].expand(4, 5)
    x = torch.arange(5.).double().expand(4, 5)
    assert_close(position[0], y.sin())
    assert_close(position[1], y.cos())
    assert_close(position[2], (y / 10000**(2 / 3)).sin())
    assert_close(position[3], x.sin())


def test_without_key_the_logits_are_positions_only():
    layer = build(use_key=False, bias=False)
    assert layer.in_proj_weight.shape == (32, 16)
    with_key = build(bias=False)
    with torch.no_grad():
        query, value = layer.in_proj_weight.split(16)
        with_key.in_proj_weight.copy_(
            torch.cat([query, torch.zeros_like(query), value]))
        with_key.rel_pos_h.copy_(layer.rel_pos_h)
        with_key.rel_pos_w.copy_(layer.rel_pos_w)
    x = rand(1, 16, 6, 5)
    assert_close(layer(x), with_key(x))


def test_value_init_std_sets_the_value_projection_only():
    torch.manual_seed(0)
    layer = StandAloneSelfAttention2d(256, 256, 3, padding=1,
                                      value_init_std=0.01)
    query, key, value = layer.in_proj_weight.split(256)
    assert value.std().item() == pytest.approx(0.01, rel=0.05)
    assert key.std().item() == pytest.approx(256**-0.5, rel=0.05)


def test_start_values_give_logits_of_order_one():
    torch.manual_seed(0)
    layer = StandAloneSelfAttention2d(256, 512, 3, padding=1, num_heads=8)
    x = torch.randn(1, 256, 8, 8).relu() * 2**0.5  # E[x^2] = 1
    query, key, _ = F.conv2d(
        x, layer.in_proj_weight[:, :, None, None]).view(3, 8, 64, 64)
    content = torch.einsum('ndi,ndj->nij', query, key)
    position = torch.einsum('ndi,ndk->nik', query[:, :32], layer.rel_pos_h)
    assert 0.5 < content.std() < 2 and 0.3 < position.std() < 2


@pytest.mark.parametrize('change, message', [
    (dict(position='learned'), "position must be one of .*got 'learned'"),
    (dict(use_key=False, position='none'),
     "use_key must be True .*got use_key=False, position='none'"),
    (dict(use_key=2), 'use_key must be a bool, got 2'),
    (dict(value_init_std=0.), 'value_init_std must be positive .*got 0.0'),
    (dict(value_init_std=1e300), r'value_init_std must .*1e6.*got 1e\+300'),
    (dict(value_init_std=float('inf')), 'value_init_std must .*got inf'),
    (dict(value_init_std='0.01'), "value_init_std must be a num.*got '0.01'"),
])
def test_bad_arguments_are_refused(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build(**change)


# --- stem


def build_stem(**kwargs):
    torch.manual_seed(0)
    return SASAStem2d(3, 16, **kwargs).double()


@pytest.mark.parametrize('mixtures', [1, 4])
@pytest.mark.parametrize('size', [(32, 40), (30, 37), (1, 1), (3, 9)],
                         ids=str)
def test_stem_keeps_any_size_and_gives_gradients(mixtures, size):
    stem = build_stem(num_mixtures=mixtures)
    out = stem(rand(2, 3, *size))
    assert out.shape == (2, 16, *size)
    out.square().sum().backward()
    for name, p in stem.named_parameters():
        assert torch.isfinite(p.grad).all(), name


def test_stem_is_the_equation_of_the_paper():
    stem = build_stem()
    x = rand(1, 3, 6, 5)  # the second blocks are partly outside
    out = stem(x)[0].detach()
    state = {k: v.detach() for k, v in stem.state_dict().items()}

    def value(y, x_):
        a, b = y % 4, x_ % 4
        place = state['mixture_pos_h'][a] + state['mixture_pos_w'][b]
        p = (state['mixture_weight'] @ place).softmax(0)
        weight = (p[:, None, None] * state['value_weight']).sum(0)
        return weight @ x[0, :, y, x_]

    for y, x_ in [(0, 0), (2, 3), (3, 4), (5, 1), (5, 4)]:
        block = [(i, j) for i in range(y // 4 * 4, min(y // 4 * 4 + 4, 6))
                 for j in range(x_ // 4 * 4, min(x_ // 4 * 4 + 4, 5))]
        for head in range(4):
            c = slice(head * 4, head * 4 + 4)
            q = state['query_weight'][c] @ x[0, :, y, x_]
            logits = []
            for i, j in block:
                r = torch.cat([state['rel_pos_h'][head, :, i - y + 3],
                               state['rel_pos_w'][head, :, j - x_ + 3]])
                logits.append(q @ (state['key_weight'][c] @ x[0, :, i, j] + r))
            p = torch.stack(logits).softmax(0)
            expected = p @ torch.stack([value(i, j)[c] for i, j in block])
            assert_close(out[c, y, x_], expected)


def test_stem_blocks_do_not_see_each_other():
    stem = build_stem()
    x = rand(1, 3, 8, 8)
    before = stem(x)
    x[..., 4:, :] = 100.
    after = stem(x)
    assert torch.equal(after[..., :4, :], before[..., :4, :])
    assert not torch.equal(after[..., 4:, :], before[..., 4:, :])


@pytest.mark.parametrize('change, message', [
    (dict(num_heads=5), 'out_channels=16, num_heads=5'),
    (dict(num_mixtures=0), 'num_mixtures must be positive, got 0'),
    (dict(block_size=-4), 'block_size must be positive, got -4'),
    (dict(block_size=65), 'block_size must be at most 64, got 65'),
])
def test_bad_stem_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        build_stem(**change)


def test_stem_accepts_an_empty_batch():
    assert SASAStem2d(3, 8)(torch.rand(0, 3, 9, 7)).shape == (0, 8, 9, 7)


@pytest.mark.parametrize('shape', [(1, 4, 8, 8), (1, 3, 8), (1, 3, 0, 8),
                                   (1, 3, 8, 0)], ids=str)
def test_stem_names_a_wrong_input(shape):
    with pytest.raises(ValueError, match=re.escape(f'H, W), got {shape}')):
        build_stem()(rand(*shape))


def test_stem_starts_with_logits_and_values_of_order_one():
    stem = SASAStem2d(64, 512, num_heads=2)  # D = 256
    expected = dict(query_weight=(64 * 256)**-0.5, key_weight=64**-0.5,
                    value_weight=(2 / 64)**0.5, rel_pos_h=1, rel_pos_w=1,
                    mixture_pos_h=1, mixture_pos_w=1,
                    mixture_weight=256**-0.5)
    assert set(expected) == set(dict(stem.named_parameters()))
    for name, std in expected.items():
        weight = stem.get_parameter(name).detach()
        assert weight.std().item() == pytest.approx(std, rel=0.15), name
        assert abs(weight.mean().item()) < std / 5, name

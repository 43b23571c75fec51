import math
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from torch import nn

from acmix_det.evaluation import build_detector
from acmix_det.evaluation.attention_maps import (Grid, View,
                                                 attention_layers,
                                                 attention_map,
                                                 attention_weights,
                                                 view_attention)
from acmix_det.evaluation.attention_plots import draw_attention, draw_mixing
from acmix_det.evaluation.mixing import Mix, mixing, mixing_table
from acmix_det.layers import ACmix2d, StandAloneSelfAttention2d
from acmix_det.layers.sasa import sinusoidal_position

DIGITS = Path(__file__).parents[2] / 'configs' / 'digits'
NAN = float('nan')


def sasa(**kwargs):
    kwargs = dict(padding=kwargs.get('dilation', 1), bias=False, num_heads=2,
                  attn_kernel_size=5, **kwargs)
    return StandAloneSelfAttention2d(4, 12, 3, **kwargs).double()


def acmix(**kwargs):
    kwargs = dict(padding=kwargs.get('dilation', 1), bias=False, num_heads=2,
                  attn_kernel_size=5, **kwargs)
    layer = ACmix2d(4, 12, 3, **kwargs).double()
    with torch.no_grad():
        layer.in_proj_bias.normal_()
        layer.alpha.fill_(1)
        layer.beta.fill_(0)
    return layer


LAYERS = {
    'SASA': sasa,
    'SASA absolute': lambda: sasa(position='absolute'),
    'SASA none': lambda: sasa(position='none'),
    'SASA q.r only': lambda: sasa(use_key=False),
    'SASA zeros dilated': lambda: sasa(padding_mode='zeros', dilation=2),
    'SASA reflect': lambda: sasa(padding_mode='reflect'),
    'SASA reference': lambda: sasa(backend='reference'),
    'ACmix': acmix,
    'ACmix dilated': lambda: acmix(dilation=2),
    'ACmix mask': lambda: acmix(padding_mode='mask'),
    'ACmix zeros': lambda: acmix(padding_mode='zeros'),
}
SIZES = {'5x7': (5, 7), '2x1': (2, 1)}


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]()


def mirrored(index, size):
    while size > 1 and not 0 <= index < size:
        index = -index if index < 0 else 2 * (size - 1) - index
    return 0 if size == 1 else index


def projected(layer, x):
    """Queries, keys and values (N, D, H, W), with positions in them."""
    if isinstance(layer, ACmix2d):
        proj = torch.einsum('oc,bchw->bohw', layer.in_proj_weight, x)
        proj = (proj + layer.in_proj_bias[:, None, None])[0]
        q, k, v = proj.view(3, layer.num_heads, layer.head_dim, *x.shape[2:])
        h, w = x.shape[2:]
        p = torch.zeros(layer.head_dim, h, w, dtype=x.dtype)
        for i in range(h):
            for j in range(w):
                place = torch.tensor([-1 + 2 * j / max(w - 1, 1),
                                      -1 + 2 * i / max(h - 1, 1)],
                                     dtype=x.dtype)
                p[:, i, j] = layer.pos_weight @ place + layer.pos_bias
        return q, k - p, v
    if layer.position == 'absolute':
        x = x + sinusoidal_position(x)
    proj = torch.einsum('oc,bchw->bohw', layer.in_proj_weight, x)[0]
    parts = proj.view(-1, layer.num_heads, layer.head_dim, *x.shape[2:])
    return parts[0], parts[1] if layer.use_key else None, parts[-1]


def literal_weights(layer, q, k, position):
    """The equation, one weight at a time."""
    h, w = q.shape[2:]
    size = layer.attn_kernel_size
    weights = np.zeros((layer.num_heads, size, size))
    for n in range(layer.num_heads):
        query = q[n, :, position[0], position[1]]
        for a in range(size):
            for b in range(size):
                i = position[0] + (a - size // 2) * layer.dilation[0]
                j = position[1] + (b - size // 2) * layer.dilation[0]
                if layer.padding_mode == 'reflect':
                    i, j = mirrored(i, h), mirrored(j, w)
                inside = 0 <= i < h and 0 <= j < w
                if not inside and layer.padding_mode == 'mask':
                    continue
                logit = 0.
                if k is not None and inside:
                    logit += float(query @ k[n, :, i, j])
                if getattr(layer, 'rel_pos_h', None) is not None:
                    r = torch.cat([layer.rel_pos_h[n, :, a],
                                   layer.rel_pos_w[n, :, b]])
                    logit += float(query @ r)
                if isinstance(layer, ACmix2d):
                    logit /= layer.head_dim**0.5
                weights[n, a, b] = math.exp(logit)
    return weights / weights.sum((1, 2), keepdims=True)


@torch.no_grad()
@pytest.mark.parametrize('size', SIZES.values(), ids=SIZES)
def test_weights_equal_literal_softmax_loops(layer, size):
    x = torch.randn(1, 4, *size, dtype=torch.float64)
    q, k, _ = projected(layer, x)
    for position in ((0, 0), (size[0] // 2, size[1] // 2),
                     (size[0] - 1, size[1] - 1)):
        weights = attention_weights(layer, x, position)
        assert weights.dtype == torch.float64
        np.testing.assert_allclose(
            weights.numpy(), literal_weights(layer, q, k, position),
            rtol=1e-10, atol=1e-14)


@torch.no_grad()
@pytest.mark.parametrize('size', SIZES.values(), ids=SIZES)
def test_map_times_values_is_the_output_of_the_layer(layer, size):
    x = torch.randn(1, 4, *size, dtype=torch.float64)
    value = projected(layer, x)[2]
    out = layer(x)[0]
    for position in ((0, 0), (size[0] // 2, size[1] // 2)):
        attn = attention_map(layer, x, position).nan_to_num(0)
        torch.testing.assert_close(
            torch.einsum('nhw,ndhw->nd', attn, value).flatten(),
            out[:, position[0], position[1]], rtol=1e-10, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize('make', [sasa, acmix])
def test_weights_with_a_stride_are_those_at_input_resolution(make):
    layer, strided = make(), make(stride=2)
    strided.load_state_dict(layer.state_dict())
    x = torch.randn(1, 4, 6, 7, dtype=torch.float64)
    assert torch.equal(attention_weights(strided, x, (2, 4)),
                       attention_weights(layer, x, (2, 4)))


def test_map_shows_the_neighborhood_only():
    x = torch.randn(1, 4, 9, 9, dtype=torch.float64)
    seen = ~attention_map(sasa(), x, (4, 1)).isnan()
    expected = torch.zeros(9, 9, dtype=torch.bool)
    expected[2:7, 0:4] = True
    assert torch.equal(seen, expected.expand(2, -1, -1))
    dilated = ~attention_map(sasa(dilation=3), x, (4, 4)).isnan()
    rows = dilated[0].any(1).nonzero().flatten().tolist()
    assert rows == [1, 4, 7]


def test_weights_outside_the_map_are_left_out_with_zeros_only():
    x = torch.randn(1, 4, 9, 9, dtype=torch.float64)
    for mode, whole in (('mask', True), ('reflect', True), ('zeros', False)):
        attn = attention_map(sasa(padding_mode=mode), x, (0, 0))
        total = attn.nansum((1, 2))
        assert bool(((total - 1).abs() < 1e-12).all()) is whole, mode
        assert (total <= 1 + 1e-12).all()


def test_layer_is_as_before():
    layer = sasa(backend='reference')
    attention_weights(layer, torch.randn(1, 4, 5, 5).double(), (1, 1))
    assert layer.backend == 'reference'


@pytest.mark.parametrize('make, shape, position, error, message', [
    (lambda: nn.Conv2d(4, 4, 3).double(), (1, 4, 5, 5), (0, 0), TypeError,
     'layer must be a SASA or ACmix layer, got Conv2d'),
    (sasa, (2, 4, 5, 5), (0, 0), ValueError,
     r'x must be a single map \(1, C, H, W\), got \(2, 4, 5, 5\)'),
    (sasa, (1, 4, 5, 6), (5, 0), ValueError,
     r'position must be .* 5 x 6, multiples of 1, got \(5, 0\)'),
    (sasa, (1, 4, 5, 6), (0, -1), ValueError, r'got \(0, -1\)'),
    (lambda: acmix(stride=2), (1, 4, 5, 6), (2, 3), ValueError,
     r'multiples of 2, got \(2, 3\)'),
], ids=['layer', 'batch', 'below', 'left', 'between'])
def test_bad_arguments_are_named(make, shape, position, error, message):
    with pytest.raises(error, match=message):
        attention_weights(make(), torch.zeros(shape).double(), position)


def test_grid_follows_resize_stride_and_padding():
    # 100 x 32 pixels, resized to 128 x 41; stride 8
    grid = Grid(8, (1.28, 41 / 32), (32, 100))
    assert grid.cell(0, 0) == (0, 0)
    assert grid.cell(99, 31) == (5, 15)
    assert grid.shape() == (6, 16)
    assert grid.cell(50, 10) == (1, 8)
    left, top, right, bottom = grid.box((1, 1), (8, 9))
    assert (left, right) == pytest.approx((50., 62.5))
    assert (top, bottom) == pytest.approx((8 * 32 / 41, 16 * 32 / 41))
    # every pixel of the image lies in its own cell
    for x in range(100):
        row, col = grid.cell(x, 7)
        box = grid.box((row, row), (col, col))
        assert box[0] <= x + 0.5 < box[2] and box[1] <= 7.5 < box[3]


def test_grid_may_be_stretched():
    grid = Grid(4, (2., 0.5), (32, 16))
    assert grid.cell(10, 10) == (1, 5)
    assert grid.shape() == (4, 8)
    assert grid.box((1, 2), (5, 5)) == (10, 8, 12, 24)


@pytest.mark.parametrize('x, y', [(-1, 0), (100, 0), (0, 32), (0, -1)])
def test_position_outside_the_image_is_named(x, y):
    with pytest.raises(ValueError, match=r'position must be 0 to 99 \(x\) and '
                       rf'0 to 31 \(y\), got {x} {y}'):
        Grid(8, (1., 1.), (32, 100)).cell(x, y)


def config(name):
    return Config.fromfile(str(DIGITS / f'{name}_digits.py'))


@pytest.fixture(scope='module')
def acmix_model():
    torch.manual_seed(0)
    cfg = config('retinanet_r18-acmix_fpn-acmix')
    return build_detector(cfg).eval(), cfg


@pytest.fixture
def picture(tmp_path):
    """100 x 32 pixels: the network sees 128 x 41 in 128 x 64."""
    pixels = np.random.default_rng(0).integers(0, 255, (32, 100, 3), np.uint8)
    cv2.imwrite(str(tmp_path / 'image.png'), pixels)
    return tmp_path / 'image.png'


def test_view_finds_the_feature_pixel_under_the_position(acmix_model,
                                                         picture):
    model, cfg = acmix_model
    name = 'neck.fpn_convs.0.conv'
    assert view_attention(model, cfg, picture, name, (80, 8)).image[
        8, 80].tolist() == cv2.imread(str(picture))[8, 80, ::-1].tolist()
    inputs = []
    handle = attention_layers(model)[name].register_forward_pre_hook(
        lambda _, args: inputs.append(args[0]))
    view = view_attention(model, cfg, picture, name, (80, 8))
    changed = cv2.imread(str(picture))
    changed[8, 80] = 255 - changed[8, 80]
    cv2.imwrite(str(picture), changed)
    view_attention(model, cfg, picture, name, (80, 8))
    handle.remove()
    assert view.grid.stride == 8 and view.maps.shape == (8, 8, 16)
    change = (inputs[1] - inputs[0]).abs().sum((0, 1))
    row, col = divmod(int(change.argmax()), 16)
    assert view.query == (1, 12)
    assert abs(row - 1) <= 1 and abs(col - 12) <= 1, (row, col)
    expected = attention_map(attention_layers(model)[name], inputs[0], (1, 12))
    np.testing.assert_array_equal(view.maps, expected.numpy())


def test_weights_on_padding_are_not_on_the_image(acmix_model, picture):
    model, cfg = acmix_model
    inside, below = (
        view_attention(model, cfg, picture, 'neck.fpn_convs.0.conv', (50, y))
        for y in (5, 31))
    np.testing.assert_allclose(inside.on_image(), 1, atol=1e-6)
    # rows 6 and 7 of 8 hold padding only
    assert below.extent() == ((3, 7), (6, 10))
    np.testing.assert_allclose(
        below.on_image(), np.nansum(below.maps[:, :6], (1, 2)))
    assert below.on_image().min() < 0.9


def test_query_of_a_strided_acmix_is_one_that_is_computed(acmix_model,
                                                          picture):
    model, cfg = acmix_model
    view = view_attention(model, cfg, picture, 'backbone.layer3.0.conv1',
                          (60, 10))
    assert view.grid.stride == 8
    assert view.grid.cell(60, 10) == (1, 9) and view.query == (0, 8)


def test_map_of_a_shared_tower_is_chosen_by_its_level(picture):
    cfg = config('retinanet-sasa_r18-sasa_fpn-sasa')
    model = build_detector(cfg)
    name = next(n for n in attention_layers(model) if 'bbox_head' in n)
    views = [view_attention(model, cfg, picture, name, (50, 5), level)
             for level in range(3)]
    assert [v.grid.stride for v in views] == [8, 16, 32]
    with pytest.raises(ValueError, match='level must be below 3.*got 3'):
        view_attention(model, cfg, picture, name, (50, 5), 3)


def test_unknown_layer_and_no_image_are_named(acmix_model, picture, tmp_path):
    model, cfg = acmix_model
    with pytest.raises(ValueError, match='layer must be one of '
                       "backbone.layer3.0.conv1, .*, got 'neck'"):
        view_attention(model, cfg, picture, 'neck', (0, 0))
    (tmp_path / 'text.png').write_text('text')
    with pytest.raises(ValueError, match='image must be an image file, got '
                       '.*text.png'):
        view_attention(model, cfg, tmp_path / 'text.png',
                       'neck.fpn_convs.0.conv', (0, 0))


def test_layer_that_sees_a_part_of_the_image_is_refused(acmix_model, picture):
    model, cfg = acmix_model
    name = 'neck.fpn_convs.2.conv'
    handle = attention_layers(model)[name].register_forward_pre_hook(
        lambda _, args: (args[0][..., :3], ))
    with pytest.raises(ValueError, match=r'layer must see the whole image, '
                       r'but neck.* \(1, 64, 2, 3\)'):
        view_attention(model, cfg, picture, name, (0, 0))
    handle.remove()


def test_pipeline_that_turns_the_image_is_refused(acmix_model, picture):
    model, cfg = acmix_model
    cfg = Config(cfg.to_dict())
    pipeline = cfg.test_dataloader.dataset.pipeline
    pipeline.insert(1, dict(type='RandomFlip', prob=1.0))
    pipeline[-1].meta_keys += ('flip', )
    with pytest.raises(ValueError, match='test pipeline must load the image'):
        view_attention(model, cfg, picture, 'neck.fpn_convs.0.conv', (0, 0))


def test_picture_places_the_weights_on_the_image():
    maps = np.full((2, 4, 4), NAN, np.float32)
    maps[:, 0:3, 1:4] = 0.05
    maps[0, 1, 2] = 0.6
    maps[1, 0, 1] = 0.3
    # twice as large in the network, stride 32: 16 pixels a cell
    view = View('layer', np.zeros((40, 64, 3), np.uint8), (33, 20), (1, 2),
                maps, Grid(32, (2., 2.), (40, 64)))
    figure = draw_attention(view)
    whole, *heads = [a for a in figure.axes if a.images]
    assert len(heads) == 2
    assert whole.images[0].get_extent() == [0, 64, 40, 0]
    for head, axis in enumerate(heads):
        ground, weights = axis.images
        assert ground.get_extent() == [0, 64, 40, 0]
        assert weights.get_extent() == [16, 64, 48, 0]
        np.testing.assert_array_equal(weights.get_array(),
                                      maps[head, :3, 1:])
        assert weights.norm.vmin == 0 and weights.norm.vmax == np.float32(.6)
        assert axis.lines[0].get_xydata().tolist() == [[33.5, 20.5]]
        outline = axis.patches[0]
        assert outline.get_xy() == (16, 0)
        assert (outline.get_width(), outline.get_height()) == (48, 40)
    assert heads[0].get_title() == 'head 0: max 0.60'
    assert heads[1].get_title() == 'head 1: max 0.30, 70% on the image'


def test_mixing_reads_every_acmix_layer_in_the_order_of_the_model():
    model = nn.Sequential(acmix(), sasa(), acmix())
    with torch.no_grad():
        model[0].alpha.fill_(-0.8)
        model[0].beta.fill_(0.2)
    assert [m.name for m in mixing(model)] == ['0', '2']
    assert mixing(model)[0] == Mix('0', pytest.approx(-.8), pytest.approx(.2))
    assert mixing(model)[0].log_ratio == pytest.approx(math.log(4))
    assert mixing(model)[1].log_ratio == math.inf  # beta is 0


def test_mixing_reads_the_acmix_layers_of_other_networks():
    class ACmixBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha = nn.Parameter(torch.tensor([0.25]))
            self.beta = nn.Parameter(torch.tensor([0.5]))

    model = nn.Sequential(nn.ReLU(), ACmixBlock())
    assert mixing(model) == [Mix('1', 0.25, 0.5)]


def test_mixing_without_acmix_is_an_error():
    with pytest.raises(ValueError, match='model must have an ACmix layer, got '
                       'Sequential without one'):
        mixing(nn.Sequential(sasa()))


MIXES = [Mix('first', -0.8, 0.2), Mix('second', 0.1, 0.4),
         Mix('third', 0.5, 0.0)]


def test_mixing_table_shows_signs_and_log_ratios():
    rows = [line.split() for line in mixing_table(MIXES).splitlines()]
    assert rows[1:] == [['first', '-0.8000', '0.2000', '1.3863'],
                        ['second', '0.1000', '0.4000', '-1.3863'],
                        ['third', '0.5000', '0.0000', 'inf']]


def test_mixing_bars_have_the_absolute_values():
    above, below = draw_mixing(MIXES).axes
    heights = [bar.get_height() for bar in above.patches]
    assert heights == [0.8, 0.1, 0.5, 0.2, 0.4, 0.0]
    ratios = [bar.get_height() for bar in below.patches]
    assert ratios == pytest.approx([math.log(4), -math.log(4), NAN],
                                   nan_ok=True)
    assert [t.get_text() for t in below.get_xticklabels()] == [
        'first', 'second', 'third'
    ]

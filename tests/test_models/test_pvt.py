import pytest
import torch
from mmdet.models.backbones import PyramidVisionTransformer
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.registry import MODELS
from mmengine.hub import get_config
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from torch.testing import assert_close

from acmix_det.evaluation import count_complexity
from acmix_det.models import ACmixPyramidVisionTransformer
from acmix_det.models.pvt import (ACmixPVTEncoderLayer,
                                  ACmixSpatialReductionAttention)
from tests.test_models.test_detectors import batch

TINY = dict(embed_dims=8, num_layers=[2, 1, 1, 1], mlp_ratios=[2, 2, 2, 2])


def small(cls=ACmixPyramidVisionTransformer, **kwargs):
    torch.manual_seed(0)
    return cls(**{**TINY, **kwargs})


def acmix_layers(model):
    return [m for m in model.modules()
            if isinstance(m, ACmixSpatialReductionAttention)]


def layer(sr_ratio=2, embed_dims=8, num_heads=2, qkv_bias=True, **kwargs):
    """A layer in float64 without a start value that hides something."""
    torch.manual_seed(0)
    attn = SpatialReductionAttention(
        embed_dims, num_heads, sr_ratio=sr_ratio, qkv_bias=qkv_bias)
    module = ACmixSpatialReductionAttention(attn, **kwargs).double()
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return module


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# classifiers of 1000 classes, less the classification head
@pytest.mark.parametrize('num_layers, sets, parameters', [
    ([2, 2, 2, 2], 1, 13_394_008),
    ([2, 2, 2, 2], 2, 13_559_896),
    ([3, 4, 6, 3], 1, 24_822_563),
    ([3, 4, 6, 3], 2, 25_159_523),
], ids=['tiny', 'tiny-2-sets', 'small', 'small-2-sets'])
def test_parameter_counts_are_exact_and_those_of_the_paper(
        num_layers, sets, parameters):
    model = ACmixPyramidVisionTransformer(
        num_layers=num_layers, attn_cfg=dict(num_shift_sets=sets))
    total = sum(p.numel() for p in model.parameters()) + 512 * 1000 + 1000
    assert total == parameters
    published = {2: 13, 3: 25}[num_layers[0]]
    # one set rounds to it, two sets miss it by 0.06 M for PVT-T
    assert abs(total / 1e6 - published) < (0.5 if sets == 1 else 0.6)


@pytest.mark.parametrize('num_layers, plain, mixed', [
    ([2, 2, 2, 2], 1.93, 2.15), ([3, 4, 6, 3], 3.81, 4.31)
], ids=['tiny', 'small'])
def test_multiply_adds_are_those_of_the_documentation(num_layers, plain,
                                                      mixed):
    for cls, expected in ((PyramidVisionTransformer, plain),
                          (ACmixPyramidVisionTransformer, mixed)):
        macs = count_complexity(cls(num_layers=num_layers), (224, 224)).macs
        assert round((macs + 512 * 1000) / 1e9, 2) == expected


def literal(module, x, h, w):
    """Both paths pixel by pixel, (H * W, C) each."""
    heads, channels = module.num_heads, x.shape[1]
    dim = channels // heads
    weight, bias = module.attn.in_proj_weight, module.attn.in_proj_bias
    proj = [[weight[i * channels:(i + 1) * channels] @ t +
             bias[i * channels:(i + 1) * channels] for t in x]
            for i in range(3)]
    q, k, v = proj
    if module.sr_ratio == 1:
        keys, values = k, v
    else:
        keys, values = [], []
        s = module.sr_ratio
        for top in range(0, h, s):
            for left in range(0, w, s):
                token = module.sr.bias.clone()
                for y in range(top, min(top + s, h)):
                    for x_ in range(left, min(left + s, w)):
                        token = token + module.sr.weight[
                            :, :, y - top, x_ - left] @ x[y * w + x_]
                token = module.norm(token)
                keys.append(weight[channels:2 * channels] @ token +
                            bias[channels:2 * channels])
                values.append(weight[2 * channels:] @ token +
                              bias[2 * channels:])
    attention = []
    for query in q:
        parts = []
        for n in range(heads):
            at = slice(n * dim, (n + 1) * dim)
            logits = torch.stack([query[at] @ key[at] for key in keys])
            attn = (logits * dim**-0.5).softmax(0)
            parts.append(sum(a * value[at] for a, value in zip(attn, values)))
        attention.append(module.attn.out_proj.weight @ torch.cat(parts) +
                         module.attn.out_proj.bias)
    shift = module.shift_weight.mean(0)  # (D * N, taps, kc, kc)
    kernel = shift.shape[-1]
    convolution = torch.zeros(h * w, channels, dtype=x.dtype)
    for y in range(h):
        for x_ in range(w):
            for dy in range(kernel):
                for dx in range(kernel):
                    i, j = y + dy - kernel // 2, x_ + dx - kernel // 2
                    if not (0 <= i < h and 0 <= j < w):
                        continue
                    for d in range(dim):
                        maps = torch.stack([
                            part[i * w + j][n * dim + d]
                            for part in (q, k, v) for n in range(heads)])
                        mixed = module.fc_weight @ maps
                        out = slice(d * heads, (d + 1) * heads)
                        convolution[y * w + x_, out] += (
                            shift[out, :, dy, dx] @ mixed)
    return torch.stack(attention), convolution


@pytest.mark.parametrize('sr_ratio, size, arguments', [
    (1, (2, 3), {}), (2, (4, 2), {}), (2, (3, 3), {}), (4, (1, 2), {}),
    (2, (2, 3), dict(conv_kernel_size=1, num_shift_sets=2)),
], ids=str)
@torch.no_grad()
def test_layer_equals_its_definition_in_loops(sr_ratio, size, arguments):
    module = layer(sr_ratio, **arguments)
    h, w = size
    x = rand(1, h * w, 8)
    attention, convolution = literal(module, x[0], h, w)
    assert attention.abs().mean() > 0.1 and convolution.abs().mean() > 0.1
    expected = x[0] + module.alpha * attention + module.beta * convolution
    assert_close(module(x, size)[0], expected)
    identity = rand(1, h * w, 8)
    assert_close(module(x, size, identity=identity)[0],
                 expected - x[0] + identity[0])
    module.beta.zero_()
    assert_close(module(x, size)[0], x[0] + module.alpha * attention)
    torch.nn.init.ones_(module.beta)
    module.alpha.zero_()
    assert_close(module(x, size)[0], x[0] + convolution)


@torch.no_grad()
def test_convolution_does_not_see_the_reduction():
    module = layer(2)
    x = rand(1, 24, 8)
    module.alpha.zero_()
    before = module(x, (4, 6))
    torch.nn.init.normal_(module.sr.weight)
    torch.nn.init.normal_(module.norm.weight)
    assert torch.equal(module(x, (4, 6)), before)
    torch.nn.init.normal_(module.attn.in_proj_weight[-8:])  # of v
    assert not torch.equal(module(x, (4, 6)), before)


def test_layer_without_biases():
    module = layer(2, qkv_bias=False)
    assert module.attn.in_proj_bias is None
    assert module(rand(1, 6, 8), (2, 3)).isfinite().all()


def test_every_block_of_a_pvt_is_acmix():
    model = small()
    blocks = [m for m in model.modules()
              if isinstance(m, ACmixPVTEncoderLayer)]
    assert len(blocks) == len(acmix_layers(model)) == 5
    assert not any(isinstance(m, SpatialReductionAttention)
                   for m in model.modules())
    assert [m.sr_ratio for m in acmix_layers(model)] == [8, 8, 4, 2, 1]


@pytest.mark.parametrize('size', [(64, 96), (33, 50), (100, 31), (5, 9),
                                  (1, 1)], ids=str)
def test_maps_of_any_image_are_rounded_up(size):
    model = small(out_indices=(0, 2, 3))
    model.eval()
    outs = model(torch.rand(2, 3, *size))
    for x, channels, stride in zip(outs, (8, 40, 64), (4, 16, 32)):
        assert x.shape == (2, channels, *(-(-s // stride) for s in size))
        assert x.isfinite().all()
    assert len(outs) == 3


@pytest.mark.parametrize('arguments', [
    dict(num_stages=2, num_layers=[1, 1], num_heads=[1, 2], strides=[4, 2],
         patch_sizes=[4, 2], sr_ratios=[8, 4], out_indices=(1, )),
    dict(patch_sizes=[7, 3, 3, 3], paddings=[3, 1, 1, 1],
         use_abs_pos_embed=False, norm_after_stage=True, use_conv_ffn=True),
    dict(qkv_bias=False), dict(drop_rate=0.1, attn_drop_rate=0.1),
    dict(in_channels=1), dict(pretrain_img_size=64),
    dict(attn_cfg=dict(conv_kernel_size=5, num_shift_sets=2)),
], ids=lambda a: next(iter(a)))
def test_arguments_of_pvt_are_accepted(arguments):
    model = small(**arguments)
    model.init_weights()
    outs = model(torch.rand(1, arguments.get('in_channels', 3), 40, 50))
    assert len(outs) == len(arguments.get('out_indices', range(4)))
    assert all(x.isfinite().all() for x in outs)


def test_dropout_of_the_attention_acts_in_training_only():
    model = small(attn_drop_rate=0.5, drop_path_rate=0.)
    x = torch.rand(1, 3, 64, 64)
    model.train()
    assert not torch.equal(model(x)[0], model(x)[0])
    model.eval()
    assert torch.equal(model(x)[0], model(x)[0])


def test_start_values_survive_init_weights():
    model = MODELS.build(dict(type='ACmixPyramidVisionTransformer', **TINY))
    model.init_weights()
    eye = torch.eye(9).view(9, 3, 3)
    for m in acmix_layers(model):
        assert torch.equal(m.shift_weight, eye.expand_as(m.shift_weight))
        assert m.alpha.item() == m.beta.item() == 0.5
        assert m.attn.out_proj.weight.std() < 0.03  # mmdet's own


def test_activation_checkpointing_changes_nothing():
    plain = small(drop_path_rate=0.).double()
    saving = small(drop_path_rate=0., with_cp=True).double()
    x = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    for model, times in ((plain, 5), (saving, 10)):
        calls = []
        for m in acmix_layers(model):
            m.register_forward_hook(lambda *args: calls.append(1))
        model.train()
        sum(out.square().mean() for out in model(x)).backward()
        assert len(calls) == times
    for a, b in zip(plain(x), saving(x)):
        assert_close(a, b)
    for (name, p), q in zip(plain.named_parameters(), saving.parameters()):
        assert_close(q.grad, p.grad, msg=lambda text: f'{name}: {text}')


def test_autocast_to_bfloat16_trains_float32_weights():
    model = small()
    with torch.autocast('cpu', torch.bfloat16):
        outs = model(torch.rand(1, 3, 40, 50))
    sum(out.float().square().mean() for out in outs).backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32, name
        assert p.grad.isfinite().all(), name


def test_half_types_agree_with_float64():
    module = layer(2)
    x = rand(1, 24, 8)
    expected = module(x, (4, 6))
    out = module.bfloat16()(x.bfloat16(), (4, 6))
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).norm() < 0.02 * expected.norm()


@pytest.fixture(scope='module')
def detector():
    config = get_config('mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py').model
    config.backbone = dict(type='ACmixPyramidVisionTransformer', **TINY)
    config.neck.update(in_channels=[8, 16, 40, 64], out_channels=32)
    config.bbox_head.update(in_channels=32, feat_channels=32)
    config.test_cfg.score_thr = 0.
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(config)
    model.init_weights()
    return model


def test_one_training_step_reaches_every_parameter(detector):
    detector.train()
    losses = detector.loss(*batch([(64, 64), (50, 33)]))
    total = sum(x if torch.is_tensor(x) else sum(x) for x in losses.values())
    total.backward()
    assert torch.isfinite(total)
    for name, p in detector.backbone.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        assert p.grad.any(), name
    torch.optim.SGD(detector.parameters(), 0.01).step()


def test_detector_predicts_on_odd_sizes(detector):
    detector.eval()
    with torch.no_grad():
        for size in ((47, 61), (35, 90)):
            result = detector.predict(*batch([size]))[0].pred_instances
            assert result.bboxes.isfinite().all() and len(result)


def test_state_dict_round_trip():
    model, other = small(), small(num_layers=[2, 1, 1, 1])
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    other.load_state_dict(model.state_dict())
    model.eval(), other.eval()
    x = torch.rand(1, 3, 40, 50)
    for a, b in zip(model(x), other(x)):
        assert torch.equal(a, b)


@pytest.fixture
def plain(tmp_path):
    torch.manual_seed(1)
    model = PyramidVisionTransformer(**TINY)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    path = tmp_path / 'pvt.pth'
    torch.save(dict(state_dict=model.state_dict()), path)
    return model.eval(), str(path)


def test_plain_weights_load_into_unchanged_layers(plain, caplog):
    MMLogger.get_current_instance().addHandler(caplog.handler)
    pvt, path = plain
    # as in mmdet's configs, without a type
    model = small(init_cfg=dict(checkpoint=path))
    model.init_weights()
    MMLogger.get_current_instance().removeHandler(caplog.handler)
    state = model.state_dict()
    for key, value in pvt.state_dict().items():
        assert torch.equal(state[key], value), key
    new = [key for key in state if key not in pvt.state_dict()]
    assert {key.split('.')[-1] for key in new} == {
        'alpha', 'beta', 'fc_weight', 'shift_weight'}
    assert all(m.alpha.item() == m.beta.item() == 0.5
               for m in acmix_layers(model))
    total = len(state)
    assert f'{total - len(new)} of {total} tensors loaded' in caplog.text
    assert f'; {len(new)} (' in caplog.text
    assert '0 of the checkpoint not used' in caplog.text


def test_warm_start_computes_what_the_plain_pvt_computes(plain):
    pvt, path = plain
    model = small(init_cfg=dict(type='WarmStart', checkpoint=path))
    model.init_weights()
    model.eval()
    x = torch.rand(2, 3, 64, 96)
    for a, b in zip(model(x), pvt(x)):
        assert b.std() > 0.1
        assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_warm_start_refuses_the_weights_of_an_acmix_pvt(tmp_path):
    path = tmp_path / 'acmix.pth'
    torch.save(small().state_dict(), path)
    model = small(init_cfg=dict(type='WarmStart', checkpoint=str(path)))
    with pytest.raises(ValueError, match="init_cfg must be of type "
                       "'Pretrained' .*WarmStart"):
        model.init_weights()


@pytest.mark.parametrize('wrap', [False, True], ids=['bare', 'model'])
def test_weights_of_the_pvt_repository_are_renamed(wrap, tmp_path):
    model = small()
    own = model.state_dict()
    released = {
        'pos_embed1': torch.rand(1, 56 * 56, 8),
        'patch_embed1.proj.weight': torch.rand(8, 3, 4, 4),
        'block1.1.attn.q.weight': torch.rand(8, 8),
        'block1.1.attn.kv.weight': torch.rand(16, 8),
        'block1.1.mlp.fc1.weight': torch.rand(16, 8),
        'head.weight': torch.rand(1000, 64),
    }
    path = tmp_path / 'released.pth'
    torch.save(dict(model=released) if wrap else released, path)
    model.init_cfg = dict(type='Pretrained', checkpoint=str(path))
    model.init_weights()
    state = model.state_dict()
    expected = {
        'layers.0.1.0.pos_embed': released['pos_embed1'],
        'layers.0.0.projection.weight': released['patch_embed1.proj.weight'],
        'layers.0.1.2.attn.attn.in_proj_weight': torch.cat([
            released['block1.1.attn.q.weight'],
            released['block1.1.attn.kv.weight']]),
        'layers.0.1.2.ffn.layers.0.weight':
            released['block1.1.mlp.fc1.weight'][..., None, None],
    }
    for key, value in expected.items():
        assert torch.equal(state[key], value), key
    assert state.keys() == own.keys()


def test_checkpoint_without_a_fitting_weight_is_an_error(tmp_path):
    path = tmp_path / 'other.pth'
    torch.save({'encoder.weight': torch.rand(2)}, path)
    model = small(init_cfg=dict(type='Pretrained', checkpoint=str(path)))
    with pytest.raises(ValueError, match='0 of [0-9]+ tensors loaded'):
        model.init_weights()


@pytest.mark.parametrize('init_cfg', [
    dict(type='Xavier', layer='Conv2d'), dict(type='Pretrained'),
    [dict(type='Pretrained', checkpoint='x.pth')]], ids=str)
def test_other_start_values_are_refused(init_cfg):
    with pytest.raises(ValueError, match='init_cfg must (be None or of type|have '
                       'a checkpoint)'):
        small(init_cfg=init_cfg).init_weights()


@pytest.mark.parametrize('arguments, error, message', [
    (dict(pretrained='x.pth'), ValueError,
     "pretrained must be None, use init_cfg.*got 'x.pth'"),
    (dict(num_heads=[1, 2]), ValueError,
     r'num_heads must have one entry .*num_stages=4, got \[1, 2\]'),
    (dict(sr_ratios=[1]), ValueError, r'sr_ratios must .*got \[1\]'),
    (dict(sr_ratios=1), TypeError, 'sr_ratios must be a list .*got 1'),
    (dict(num_stages='4'), TypeError, "num_stages must be an int, got '4'"),
    (dict(out_indices=3), TypeError, 'out_indices must be a list .*got 3'),
    (dict(init_cfg='x.pth'), TypeError, "init_cfg must be a dict.*'x.pth'"),
    (dict(mlp_ratios=[1]), ValueError, r'mlp_ratios must .*got \[1\]'),
    (dict(out_indices=(4, )), ValueError,
     r'out_indices must be stages from 0 to 3, got \(4,\)'),
    (dict(attn_cfg=dict(num_heads=2)), TypeError,
     "conv_kernel_size, num_shift_sets.*got 'num_heads'"),
    (dict(attn_cfg=dict(type='ACmix')), ValueError,
     "attn_cfg must have no 'type'"),
    (dict(attn_cfg='ACmix'), TypeError, "attn_cfg must be a dict.*'ACmix'"),
    (dict(attn_cfg=dict(conv_kernel_size=2)), ValueError,
     'conv_kernel_size must be odd, got 2'),
    (dict(attn_cfg=dict(num_shift_sets=0)), ValueError,
     'num_shift_sets must be positive, got 0'),
    (dict(unknown=1), TypeError, 'unknown'),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else '')
def test_bad_arguments_are_named_with_their_value(arguments, error, message):
    with pytest.raises(error, match=message):
        small(**arguments)

"""The Swin Transformer with ACmix: released weights, any size, in detectors."""
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmdet.models.backbones.swin import ShiftWindowMSA, SwinTransformer
from mmdet.registry import MODELS
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config, ConfigDict
from mmengine.hub import get_config
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from acmix_det.checkpoints import convert_acmix
from acmix_det.evaluation import count_complexity
from acmix_det.layers.acmix import shift_conv
from acmix_det.layers.acmix_window import ACmixWindowMSA
from acmix_det.models import ACmixSwinTransformer
from tests.test_models.test_detectors import batch

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / 'configs/acmix').glob('*swin*.py'))
FIXTURE = ROOT / 'tests/data/acmix_swin_w7_56.npz'
ACMIX_KEYS = ('rate1', 'rate2', 'fc.weight', 'fc.bias', 'dep_conv.weight')


def released():
    """Released weights, image and outputs of the stages."""
    data = np.load(FIXTURE)
    tensors = {k: torch.from_numpy(data[k]) for k in data.files
               if k != 'config'}
    state = {k[len('state.'):]: x for k, x in tensors.items()
             if k.startswith('state.')}
    config = json.loads(str(data['config']))
    stages = [tensors[f'stage{i}'] for i in range(len(config['depths']))]
    return state, tensors['x'], stages


def plain():
    """The same without what ACmix adds: weights of a plain Swin."""
    return {k: x for k, x in released()[0].items()
            if not k.endswith(ACMIX_KEYS)}


TWO_STAGES = dict(embed_dims=12, depths=(2, 2), num_heads=(2, 3),
                  strides=(4, 2), out_indices=(0, 1))


def small(**kwargs):
    torch.manual_seed(0)
    return ACmixSwinTransformer(**{**TWO_STAGES, **kwargs})


def pretrained(path, kind='Pretrained', **kwargs):
    return dict(type=kind, checkpoint=str(path), **kwargs)


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.fixture
def log(caplog):
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def save(tmp_path):
    def write(state):
        torch.save(state, tmp_path / 'weights.pth')
        return tmp_path / 'weights.pth'
    return write


@pytest.mark.parametrize('dtype, tolerance', [
    (torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_released_network_comes_out(dtype, tolerance):
    state, x, stages = released()
    model = small()
    result = model.load_state_dict(convert_acmix(state), strict=False)
    assert not result.unexpected_keys
    assert all(key.startswith('norm') for key in result.missing_keys)
    model.norm0 = model.norm1 = nn.Identity()  # none there
    model.eval().to(dtype)
    for out, expected in zip(model(x.to(dtype)), stages):
        error = (out - expected).abs().max()
        assert error <= tolerance * expected.abs().max()


@pytest.mark.parametrize('convert', [convert_acmix, dict],
                         ids=['converted', 'as-released'])
def test_released_checkpoint_loads_and_survives_a_round_trip(convert, save,
                                                             tmp_path):
    state, x, _ = released()
    direct = small()
    direct.load_state_dict(convert_acmix(state), strict=False)
    loaded = small(init_cfg=pretrained(save(convert(state))))
    nn.init.zeros_(loaded.stages[0].blocks[0].attn.fc_weight)
    loaded.init_weights()
    torch.save(loaded.state_dict(), tmp_path / 'again.pth')
    again = small()
    again.load_state_dict(torch.load(tmp_path / 'again.pth'))
    outs = [m.eval()(x.float()) for m in (direct, loaded, again)]
    for expected, *others in zip(*outs):
        for out in others:
            assert torch.equal(out, expected)


@pytest.mark.parametrize('depths, parameters, gmacs', [
    ((2, 2, 6, 2), 28_649_908, 4.6), ((2, 2, 18, 2), 50_345_080, 9.0)],
    ids=['tiny', 'small'])
def test_parameters_and_multiply_adds_are_those_of_the_release(
        depths, parameters, gmacs):
    model = ACmixSwinTransformer(depths=depths)
    norms = sum(count(getattr(model, f'norm{i}')) for i in range(4))
    head = 2 * 768 + 1000 * 768 + 1000  # final norm and 1000 classes
    assert count(model) - norms + head == parameters
    macs = count_complexity(model, (224, 224)).macs
    assert macs / 1e9 == pytest.approx(gmacs, abs=0.1)


def layer(channels=12, heads=2, shift=3, window=7, **kwargs):
    torch.manual_seed(0)
    made = ACmixWindowMSA(
        ShiftWindowMSA(channels, heads, window, shift, **kwargs)).double()
    for p in made.parameters():
        nn.init.normal_(p, std=0.5)
    return made


def only(made, part):
    """The layer with one of its two paths."""
    with torch.no_grad():
        made.alpha.fill_(part == 'attention')
        made.beta.fill_(part == 'convolution')
    return made


def rand_map(h, w, channels=12):
    return torch.randn(2, h * w, channels, dtype=torch.float64)


def released_convolution(made, x, h, w, shift):
    """Convolution path as published: every map exists, no window does."""
    n, c = made.num_heads, x.shape[2]
    qkv = F.linear(x, made.w_msa.qkv.weight, made.w_msa.qkv.bias)
    maps = qkv.view(2, h, w, 3 * n, c // n).roll((-shift, -shift), (1, 2))
    mixed = torch.einsum('tm,bhwmd->bdthw', made.fc_weight, maps)
    mixed = mixed + made.fc_bias[:, None, None]
    out = F.conv2d(mixed.flatten(1, 2), made.shift_weight[0], padding=1,
                   groups=c // n)
    return out.permute(0, 2, 3, 1).roll((shift, shift), (1, 2)).flatten(1, 2)


@pytest.mark.parametrize('heads', [2, 6])  # composed, in two steps
@pytest.mark.parametrize('size, shift', [
    ((14, 21), 3), ((14, 21), 0), ((10, 15), 3), ((8, 30), 3), ((10, 15), 0),
    ((7, 20), 3), ((5, 3), 3), ((1, 1), 3)], ids=str)
def test_convolution_sees_the_shifted_map_without_window_padding(
        heads, size, shift):
    made = only(layer(heads=heads, shift=shift), 'convolution')
    x = rand_map(*size)
    shift = shift if min(size) > 7 else 0
    assert_close(made(x, size), released_convolution(made, x, *size, shift))


@pytest.mark.parametrize('heads', [2, 6])
def test_convolution_takes_the_order_of_fewer_multiply_adds(heads):
    proj = torch.rand(2, 3 * 12, 10, 15)
    fc, shift = torch.rand(9, 3 * heads), torch.rand(1, 12, 9, 3, 3)
    with FlopCounterMode(display=False) as counter:
        shift_conv(proj, fc, shift)
    composed, stepwise = 9 * 3 * heads * 12, 9 * (3 + 9) * 12
    # the composition itself does not grow with the map
    assert counter.get_total_flops() == pytest.approx(
        2 * 2 * 150 * min(composed, stepwise), rel=0.05)


@pytest.mark.parametrize('size', [(14, 21), (10, 15), (8, 30)], ids=str)
@pytest.mark.parametrize('shift', [0, 3])
@pytest.mark.parametrize('bias', [True, False], ids=['bias', 'no-bias'])
def test_attention_is_that_of_mmdet(size, shift, bias):
    plain = ShiftWindowMSA(12, 2, 7, shift, qkv_bias=bias,
                           qk_scale=0.7).double()
    made = only(ACmixWindowMSA(plain).double(), 'attention')
    nn.init.normal_(plain.w_msa.relative_position_bias_table)
    x = rand_map(*size)
    expected = plain(x, size)
    upstream = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, list(plain.parameters()), upstream)
    out = made(x, size)
    assert_close(out, expected)
    for (name, _), a, b in zip(
            plain.named_parameters(), grads,
            torch.autograd.grad(out, list(plain.parameters()), upstream)):
        assert_close(b, a, msg=lambda text: f'{name}: {text}')


@pytest.mark.parametrize('size', [(7, 20), (20, 7), (7, 7), (4, 9), (1, 1)],
                         ids=str)
def test_nothing_is_shifted_where_one_window_spans_the_map(size):
    shifted, still = layer(shift=3), layer(shift=0)
    still.load_state_dict(shifted.state_dict())
    x = rand_map(*size)
    assert torch.equal(shifted(x, size), still(x, size))


def test_paths_mix_with_alpha_and_beta():
    made = layer()
    x = rand_map(10, 15)
    attention = only(made, 'attention')(x, (10, 15))
    convolution = only(made, 'convolution')(x, (10, 15))
    assert attention.abs().mean() > 0.1 and convolution.abs().mean() > 0.1
    with torch.no_grad():
        made.alpha.fill_(0.3), made.beta.fill_(-2.)
    assert_close(made(x, (10, 15)), 0.3 * attention - 2 * convolution)


@pytest.mark.parametrize('out_indices', [(0, 1), (1, ), (0, )], ids=str)
def test_outputs_are_normed_and_rounded_up_at_any_size(out_indices):
    model = small(out_indices=out_indices)
    outs = model(torch.rand(2, 3, 37, 61))
    shapes = [(2, 12, 10, 16), (2, 24, 5, 8)]
    assert [x.shape for x in outs] == [shapes[i] for i in out_indices]
    for x in outs:
        assert_close(x.mean(1), torch.zeros_like(x[:, 0]), atol=1e-5, rtol=0)
    names = {name for name, _ in model.named_children()
             if name.startswith('norm')}
    assert names == {f'norm{i}' for i in out_indices}


def assert_start_values(model):
    layers = [m for m in model.modules() if isinstance(m, ACmixWindowMSA)]
    assert layers
    for m in layers:
        eye = torch.eye(9).view(9, 3, 3)
        assert torch.equal(m.shift_weight, eye.expand_as(m.shift_weight))
        assert m.alpha.item() == m.beta.item() == 0.5
        assert not m.fc_bias.any()
        std = m.fc_weight.numel()**-0.5
        assert m.fc_weight.std().item() == pytest.approx(std, rel=0.3)
        assert 0.01 < m.w_msa.relative_position_bias_table.std() < 0.03


def detector(**backbone):
    cfg = get_config('mmdet::swin/retinanet_swin-t-p4-w7_fpn_1x_coco.py').model
    cfg.backbone.update(
        type='ACmixSwinTransformer', init_cfg=None, embed_dims=24,
        depths=(2, 2, 2, 2), **backbone)
    cfg.neck.update(in_channels=[48, 96, 192], out_channels=32)
    cfg.bbox_head.update(in_channels=32, feat_channels=32)
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmdet'):
        return MODELS.build(cfg)


def test_start_values_survive_init_weights_of_the_host():
    model = detector()
    for m in model.backbone.modules():
        if isinstance(m, ACmixWindowMSA):
            for p in m.parameters():
                nn.init.constant_(p, 3.)
    model.init_weights()
    assert_start_values(model)
    assert_start_values(small())


@pytest.mark.parametrize('with_cp', [False, True])
@pytest.mark.parametrize('bf16', [False, True])
def test_detector_trains_a_step_and_predicts_on_odd_sizes(with_cp, bf16):
    model = detector(with_cp=with_cp)
    model.init_weights()
    images, samples = batch([(65, 97), (50, 33)])
    with torch.autocast('cpu', torch.bfloat16, enabled=bf16):
        losses = model.loss(images, samples)
        total = sum(sum(x) for x in losses.values())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    total.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        if '.attn.' in name and 'qkv.bias' not in name:
            assert p.grad.any(), name
    optimizer.step()
    assert total.isfinite()
    model.eval()
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16, enabled=bf16):
        result = model.predict(*batch([(33, 50)]))[0].pred_instances
    assert result.bboxes.isfinite().all()


def test_bfloat16_stays_near_float32():
    model = small().eval()
    x = torch.rand(1, 3, 90, 70)
    with torch.no_grad():
        expected = model(x)
        with torch.autocast('cpu', torch.bfloat16):
            outs = model(x)
    for a, b in zip(outs, expected):
        assert (a - b).abs().mean() < 0.02 * b.abs().mean()
        assert not torch.equal(a, b)


@pytest.mark.parametrize('frozen_stages', [-1, 0, 1])
@pytest.mark.filterwarnings('ignore:frozen_stages')
def test_activation_checkpointing_changes_nothing(frozen_stages):
    models = [small(with_cp=with_cp, frozen_stages=frozen_stages,
                    drop_path_rate=0.5, attn_drop_rate=0.2).double()
              for with_cp in (False, True)]
    x = torch.rand(4, 3, 40, 52, dtype=torch.float64)
    calls, outs = [], []
    for model in models:
        calls.append([])
        for stage in model.stages:
            for block in stage.blocks:
                block.attn.register_forward_pre_hook(
                    lambda *_, seen=calls[-1]: seen.append(1))
        model.train()
        torch.manual_seed(1)
        outs.append(model(x))
        sum(out[:, 0].sin().sum() for out in outs[-1]).backward()
    frozen = 2 if frozen_stages == 1 else 0
    assert len(calls[0]) == 4 and len(calls[1]) == 8 - frozen
    for a, b in zip(*outs):
        assert_close(a, b)
    for (name, p), q in zip(models[0].named_parameters(),
                            models[1].parameters()):
        assert (p.grad is None) == (q.grad is None) == (
            not p.requires_grad), name
        if p.grad is not None:
            assert_close(q.grad, p.grad, msg=lambda text: f'{name}: {text}')


@pytest.mark.parametrize('rate', ['drop_path_rate', 'attn_drop_rate',
                                  'drop_rate'])
def test_drop_rates_act_in_training_only(rate):
    model = small(**{'drop_path_rate': 0., rate: 0.5})
    x = torch.rand(4, 3, 40, 40)
    for mode in (True, False):
        assert model.train(mode) is model
        outs = [model(x)[0] for _ in range(2)]
        assert torch.equal(*outs) != mode


def test_drop_path_grows_with_depth_as_in_mmdet():
    model, reference = small(drop_path_rate=0.3), SwinTransformer(
        **TWO_STAGES, drop_path_rate=0.3)
    rates = [[(b.attn.drop.drop_prob, b.ffn.dropout_layer.drop_prob)
              for stage in m.stages for b in stage.blocks]
             for m in (model, reference)]
    assert rates[0] == rates[1] and rates[0][-1] == pytest.approx((0.3, 0.3))


def test_dropped_path_drops_attention_and_convolution():
    made = layer(dropout_layer=dict(type='DropPath', drop_prob=0.5)).train()
    torch.manual_seed(0)
    outs = torch.cat([made(rand_map(8, 9), (8, 9)) for _ in range(8)])
    kept = outs.flatten(1).any(1)
    assert 0 < kept.sum() < 16


def test_drop_of_the_projection_spares_the_convolution():
    made = layer(proj_drop_rate=1.).train()
    x = rand_map(8, 9)
    assert not only(made, 'attention')(x, (8, 9)).any()
    assert_close(only(made, 'convolution')(x, (8, 9)),
                 released_convolution(made, x, 8, 9, 3))


def test_frozen_stages_stay_frozen():
    with pytest.warns(UserWarning, match='frozen_stages=1 freezes.*-1'):
        model = small(frozen_stages=1, drop_path_rate=0.5)
    for _ in range(2):
        frozen = (model.patch_embed, model.stages[0], model.norm0)
        for m in frozen:
            assert not any(p.requires_grad for p in m.parameters())
            assert not any(x.training for x in m.modules())
        for m in (model.stages[1], model.norm1):
            assert all(p.requires_grad for p in m.parameters())
            assert m.training
        model.train()


def mmdet_names(prefix=''):
    """A checkpoint of mmdet's SwinTransformer."""
    torch.manual_seed(1)
    model = SwinTransformer(**TWO_STAGES)
    for p in model.parameters():
        nn.init.normal_(p)
    return {prefix + k: x for k, x in model.state_dict().items()}


@pytest.mark.parametrize('state, prefix, unused', [
    (lambda: mmdet_names(), None, 0),
    (lambda: dict(state_dict={**mmdet_names('backbone.'),
                              'neck.weight': torch.rand(2)}), None, 0),
    (lambda: mmdet_names('module.encoder.'), 'encoder', 0),
    (lambda: {**mmdet_names(), 'odd.weight': torch.rand(2)}, None, 1),
], ids=['plain', 'detector', 'prefix', 'stray'])
def test_weights_of_mmdets_swin_load_into_all_it_has(state, prefix, unused,
                                                     save, log):
    model = small(init_cfg=pretrained(save(state()), prefix=prefix))
    model.init_weights()
    own, expected = model.state_dict(), mmdet_names()
    new = set(own) - set(expected)
    assert {key.rpartition('.attn.')[2] for key in new} == {
        'fc_weight', 'fc_bias', 'shift_weight', 'alpha', 'beta'}
    loaded = set(own) - new
    assert set(expected) - loaded == {
        key for key in expected if key.endswith('relative_position_index')}
    for key in loaded:
        assert torch.equal(own[key], expected[key]), key
    assert (f'{len(loaded)} of {len(own)} tensors loaded' in log.text)
    assert f'; {len(new)} (' in log.text
    assert re.search(rf'; {unused} (\(.*\) )?of the checkpoint not used',
                     log.text)
    assert 'interpolated' not in log.text


def test_tensors_of_another_shape_are_left_out_and_told(save, log):
    model = small(in_channels=1, init_cfg=pretrained(save(mmdet_names())))
    own = model.patch_embed.projection.weight.clone()
    model.init_weights()
    assert torch.equal(model.patch_embed.projection.weight, own)
    assert torch.equal(model.patch_embed.projection.bias,
                       mmdet_names()['patch_embed.projection.bias'])
    assert ('1 (patch_embed.projection.weight) of the checkpoint not used'
            in log.text)


def test_warm_start_computes_what_the_plain_swin_computes(save, log):
    path = save(dict(model={
        **plain(), 'head.weight': torch.rand(10, 24),
        'layers.0.blocks.1.attn_mask': torch.rand(4, 49, 49)}))
    reference = SwinTransformer(
        **TWO_STAGES, convert_weights=True,
        init_cfg=ConfigDict(pretrained(path)))
    model = small(init_cfg=pretrained(path, 'WarmStart'))
    x = torch.rand(1, 3, 130, 110)
    for m in (reference, model):
        m.init_weights()
        m.eval()
    for a, b in zip(model(x), reference(x)):
        assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert 'alpha is 1 and beta 0' in log.text
    sum(out.square().mean() for out in model(x)).backward()
    for name, p in model.named_parameters():
        if name.endswith('.beta'):
            assert p.grad.abs() > 0, name


def test_position_tables_of_another_window_are_interpolated(save, log):
    state = mmdet_names()
    key = 'stages.0.blocks.1.attn.w_msa.relative_position_bias_table'
    rows = torch.linspace(-1, 1, 13)
    state[key] = torch.stack([
        rows[:, None].expand(13, 13).flatten(),
        rows.square().expand(13, 13).flatten()], 1)
    model = small(window_size=5, init_cfg=pretrained(save(state)))
    model.init_weights()
    down, across = model.state_dict()[key].T.unflatten(1, (9, 9))
    assert_close(down, down[:, :1].expand(9, 9))
    assert_close(across, across[:1].expand(9, 9))
    # cell centers: 9 fill what 13 fill
    expected = (torch.arange(9) - 4) * 13 / 9 / 6
    assert_close(down[:, 0], expected, atol=0.02, rtol=0)
    assert_close(across[0, 4], torch.tensor(0.), atol=1e-2, rtol=0)
    assert_close(across[0], across[0].flip(0))
    assert '4 position tables interpolated' in log.text


@pytest.mark.parametrize('shape', [(), (3, ), (0, 2), (170, 2), (25, 2, 1)],
                         ids=str)
def test_position_tables_of_no_window_are_not_used(save, log, shape):
    name = 'stages.0.blocks.0.attn.w_msa.relative_position_bias_table'
    state = dict(small().state_dict(), **{name: torch.ones(shape)})
    small(init_cfg=pretrained(save(state))).init_weights()
    assert f'1 ({name}) start new' in log.text


@pytest.mark.parametrize('change', [dict(prefix='neck'), {}], ids=str)
def test_checkpoint_without_a_fitting_weight_is_an_error(change, save):
    path = save(mmdet_names('encoder.'))
    model = small(init_cfg=pretrained(path, **change))
    with pytest.raises(ValueError, match='0 of [0-9]+ tensors loaded.*prefix'):
        model.init_weights()


def test_frozen_stage_warns_of_what_the_checkpoint_lacks(save, recwarn):
    full = small(frozen_stages=1, init_cfg=pretrained(
        save(convert_acmix(released()[0]))))
    full.norm0.requires_grad_(True)  # a released network has none
    full.init_weights()
    assert not [w for w in recwarn if 'frozen_stages' in str(w.message)]
    model = small(frozen_stages=1, init_cfg=pretrained(save(plain())))
    with pytest.warns(UserWarning, match='frozen_stages=1.*attn.fc_weight'):
        model.init_weights()


@pytest.mark.parametrize('arguments, message', [
    (dict(pretrained='x.pth'), "pretrained must be None.*got 'x.pth'"),
    (dict(use_abs_pos_embed=True), 'use_abs_pos_embed must be False.*True'),
    (dict(num_heads=(2, 5)), 'num_heads must divide.*num_heads=5 for 24'),
    (dict(num_heads=(2, )), r'num_heads must .*2 depths, got \(2,\)'),
    (dict(strides=(4, 2, 2)), r'strides must .*2 depths, got \(4, 2, 2\)'),
    (dict(out_indices=(0, 2)), r'out_indices must .*0 to 1, got \(0, 2\)'),
    (dict(window_size=0), 'window_size must be positive, got 0'),
    (dict(depths=2), 'depths must be a list or tuple, got 2'),
    (dict(out_indices='01'), "out_indices must be a list or .*got '01'"),
    (dict(qk_scale={}), r'qk_scale must be a number, got \{\}'),
    (dict(init_cfg='x.pth'), "init_cfg must be a dict.*got 'x.pth'"),
    (dict(frozen_stages=1.5), 'frozen_stages must be an int, got 1.5'),
    (dict(frozen_stages=3), 'frozen_stages must be from -1 to 2, got 3'),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else '')
def test_bad_arguments_are_named_with_their_value(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        small(**arguments)


def test_unfit_init_cfg_is_refused(save):
    model = small(init_cfg=dict(type='Xavier', layer='Linear'))
    with pytest.raises(ValueError, match="init_cfg must be .*'Xavier'"):
        model.init_weights()
    path = save(released()[0])
    model = small(init_cfg=pretrained(path, 'WarmStart'))
    with pytest.raises(ValueError, match="'Pretrained'.*got.*'WarmStart'"):
        model.init_weights()


def unscoped(cfg):
    """Without the marks of inheritance across packages."""
    if isinstance(cfg, dict):
        return {k: unscoped(x) for k, x in cfg.items() if k != '_scope_'}
    return [unscoped(x) for x in cfg] if isinstance(cfg, list) else cfg


def flat(cfg, prefix=''):
    if isinstance(cfg, dict) and cfg:
        return {key: value for name, child in cfg.items()
                for key, value in flat(child, f'{prefix}.{name}').items()}
    return {prefix[1:]: cfg}


def difference(new, old):
    new, old = (flat(unscoped(cfg.to_dict())) for cfg in (new, old))
    assert set(old) <= set(new)
    return {key: value for key, value in new.items()
            if key not in old or old[key] != value}


NO_DECAY = {f'optim_wrapper.paramwise_cfg.custom_keys.attn.{name}.decay_mult':
            0. for name in ('alpha', 'beta')}
WARM = {'model.backbone.type': 'ACmixSwinTransformer',
        'model.backbone.init_cfg.type': 'WarmStart',
        'custom_imports.imports': ['acmix_det'],
        'custom_imports.allow_failed_imports': False}


@pytest.mark.parametrize('name, changes', [
    ('retinanet_swin-t{}_fpn_1x_coco', WARM),
    ('mask-rcnn_swin-t{}_fpn_1x_coco', {**WARM, **NO_DECAY}),
    ('mask-rcnn_swin-t{}_fpn_amp-ms-crop-3x_coco', {**WARM, **NO_DECAY}),
    ('mask-rcnn_swin-s{}_fpn_amp-ms-crop-3x_coco', {**WARM, **NO_DECAY}),
])
def test_config_is_mmdets_recipe_with_acmix(name, changes):
    ours = ROOT / f'configs/acmix/{name.format("-acmix")}.py'
    base = get_config(f'mmdet::swin/{name.format("-p4-w7")}.py')
    assert difference(Config.fromfile(ours), base) == changes


def load(stem):
    return Config.fromfile(ROOT / f'configs/acmix/{stem}.py')


def test_small_configs_differ_from_tiny_ones_in_depth_and_weights():
    small_ones = [path.stem for path in CONFIGS if '_swin-s' in path.stem]
    assert len(CONFIGS) == 2 * len(small_ones) == 8
    for name in small_ones:
        changed = difference(load(name), load(name.replace('swin-s', 'swin-t')))
        weights = changed.pop('model.backbone.init_cfg.checkpoint')
        assert 'swin_small_patch4_window7_224' in weights
        assert changed.pop('pretrained') == weights
        assert changed == {'model.backbone.depths': [2, 2, 18, 2]}


def test_cascade_trains_as_mask_rcnn_does():
    cascade, mask = (load(f'{name}_swin-t-acmix_fpn_1x_coco')
                     for name in ('cascade-mask-rcnn', 'mask-rcnn'))
    for key in ('param_scheduler', 'train_cfg', 'train_dataloader',
                'auto_scale_lr'):
        assert unscoped(cascade[key]) == unscoped(mask[key]), key
    wrapper = unscoped(mask.optim_wrapper.to_dict())
    del wrapper['paramwise_cfg']['custom_keys']['absolute_pos_embed']
    assert unscoped(cascade.optim_wrapper.to_dict()) == wrapper
    assert unscoped(cascade.model.backbone.init_cfg) == unscoped(
        mask.model.backbone.init_cfg)
    models = []
    for cfg in (cascade, mask):
        cfg.model.backbone.init_cfg = None
        models.append(MODELS.build(cfg.model.backbone))
    assert str(models[0]) == str(models[1])


@pytest.mark.parametrize('name', ['mask-rcnn', 'cascade-mask-rcnn'])
def test_two_stage_config_trains_a_step_and_predicts(name):
    cfg = load(f'{name}_swin-t-acmix_fpn_1x_coco')
    cfg.model.backbone.update(init_cfg=None, embed_dims=24)
    cfg.model.neck.in_channels = [24, 48, 96, 192]
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(cfg.model)
    model.init_weights()
    images, samples = batch([(64, 64), (50, 33)])
    for sample in samples:
        height, width = sample.img_shape
        sample.gt_instances.masks = BitmapMasks(
            np.ones((1, height, width), np.uint8), height, width)
    losses = model.loss(images, samples)
    total = sum(x if torch.is_tensor(x) else sum(x)
                for key, x in losses.items() if 'loss' in key)
    total.backward()
    for key, p in model.backbone.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), key
    model.eval()
    with torch.no_grad():
        result = model.predict(*batch([(45, 64)]))[0].pred_instances
    assert result.bboxes.isfinite().all()

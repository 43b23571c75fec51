import copy

import pytest
import torch
from mmdet.models.backbones import ResNet
from mmdet.models.backbones.resnet import Bottleneck
from mmdet.registry import MODELS
from mmengine.logging import MMLogger
from torch import nn
from torch.testing import assert_close

from acmix_det.layers import (ACmix2d, AttentionConv2d, SASAStem2d,
                              StandAloneSelfAttention2d)
from acmix_det.models import ACmixResNet, SASAResNet

BACKBONES = pytest.mark.parametrize('cls', [SASAResNet, ACmixResNet])
ALL = (True, True, True, True)


def count(model):
    return sum(p.numel() for p in model.parameters())


def small(cls, depth=26, **kwargs):
    torch.manual_seed(0)
    return cls(depth, **{'base_channels': 16, **kwargs})


# classifiers of 1000 classes, less the classification head
@pytest.mark.parametrize('model, parameters', [
    (lambda: SASAResNet(50), 18_038_632),
    (lambda: SASAResNet(50, attn_cfg=dict(position='none')), 18_012_200),
    (lambda: ACmixResNet(26), 10_487_816),
    (lambda: ACmixResNet(38), 14_410_896),
    (lambda: ACmixResNet(50), 18_333_976),
], ids=['sasa50', 'sasa50-no-position', 'acmix26', 'acmix38', 'acmix50'])
def test_parameter_counts_are_exact(model, parameters):
    assert count(model()) == parameters - (2048 * 1000 + 1000)


@pytest.mark.parametrize('model, millions', [
    (lambda: SASAResNet(26), 10.3), (lambda: SASAResNet(38), 14.1),
    (lambda: SASAResNet(26, attn_stem={}), 10.3),
    (lambda: SASAResNet(50, attn_stem={}), 18.0),
    (lambda: ACmixResNet(26, attn_cfg=dict(num_shift_sets=2)), 10.6),
    (lambda: ACmixResNet(50, attn_cfg=dict(num_shift_sets=2)), 18.6),
    (lambda: SASAResNet(50, stage_with_attn=(False, True, True, True)), 18.1),
    (lambda: SASAResNet(50, stage_with_attn=(True, True, True, False)), 22.7),
    (lambda: SASAResNet(50, attn_cfg=dict(use_key=False)), 16.7),
])
def test_parameter_counts_of_the_papers(model, millions):
    # published figures do not all round exactly
    assert (count(model()) + 2049000) / 1e6 == pytest.approx(millions, abs=.1)


@BACKBONES
@pytest.mark.parametrize('depth, convs', [(18, 16), (26, 8), (34, 32),
                                          (38, 12), (50, 16), (101, 33),
                                          (152, 50)])
def test_every_depth_swaps_every_spatial_convolution(cls, depth, convs):
    model = small(cls, depth)
    swapped = [m for m in model.modules() if isinstance(m, AttentionConv2d)]
    assert len(swapped) == convs
    spatial = [
        name for name, m in model.named_modules()
        if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1)
    ]
    assert spatial == ['conv1']  # the stem
    model.eval()
    widths = [16, 32, 64, 128]
    if model.block is Bottleneck:
        widths = [4 * w for w in widths]
    sizes = [(9, 6), (5, 3), (3, 2), (2, 1)]  # rounded up
    for x, width, size in zip(model(torch.rand(1, 3, 36, 24)), widths, sizes):
        assert x.shape == (1, width, *size) and torch.isfinite(x).all()


@BACKBONES
def test_train_and_eval_return_the_model(cls):
    model = small(cls)
    assert model.eval() is model and model.train() is model


@BACKBONES
@pytest.mark.parametrize('stage_with_attn', [(False, True, False, True), ALL],
                         ids=str)
def test_only_the_chosen_stages_are_swapped(cls, stage_with_attn):
    model = small(cls, stage_with_attn=stage_with_attn)
    for i, with_attn in enumerate(stage_with_attn, 1):
        for block in getattr(model, f'layer{i}'):
            assert isinstance(block.conv2, AttentionConv2d) == with_attn


@BACKBONES
def test_unchanged_layers_compute_what_resnet_computes(cls):
    # attention in the last stage only: the stages before are mmdet's
    torch.manual_seed(0)
    reference = ResNet(50, base_channels=16)
    model = small(cls, 50, stage_with_attn=(False, False, False, True))
    reference.eval(), model.eval()
    state = {k: v for k, v in reference.state_dict().items()
             if k in model.state_dict()}
    model.load_state_dict(state, strict=False)
    x = torch.rand(1, 3, 64, 96)
    for a, b in list(zip(model(x), reference(x)))[:3]:
        assert torch.equal(a, b)


@BACKBONES
@pytest.mark.parametrize('arguments', [
    dict(style='caffe'), dict(avg_down=True), dict(deep_stem=True),
    dict(dilations=(1, 1, 1, 2), strides=(1, 2, 2, 1)),
    dict(num_stages=3, strides=(1, 2, 2), dilations=(1, 1, 1),
         out_indices=(1, 2)),
    dict(norm_cfg=dict(type='GN', num_groups=8)),
    dict(plugins=[dict(cfg=dict(type='ContextBlock', ratio=1. / 16),
                       position='after_conv3')]),
    dict(zero_init_residual=False), dict(in_channels=1),
    dict(conv_cfg=dict(type='ConvWS')),
    dict(attn_cfg=dict(attn_kernel_size=3, num_heads=2)),
    dict(attn_stem=dict(num_mixtures=2)),
], ids=lambda a: next(iter(a)))
def test_arguments_of_resnet_are_accepted(cls, arguments):
    model = small(cls, **arguments)
    model.init_weights()
    outs = model(torch.rand(1, arguments.get('in_channels', 3), 33, 50))
    assert len(outs) == len(arguments.get('out_indices', range(4)))
    assert all(torch.isfinite(x).all() for x in outs)


def test_attn_cfg_type_wins_over_the_default():
    model = small(SASAResNet, attn_cfg=dict(type='ACmix', num_heads=2))
    assert isinstance(model.layer1[0].conv2, ACmix2d)
    model = small(SASAResNet, attn_cfg=dict(type=StandAloneSelfAttention2d))
    assert isinstance(model.layer1[0].conv2, StandAloneSelfAttention2d)


def test_attention_stem_has_stride_four_at_any_size():
    model = small(SASAResNet, attn_stem={})
    assert isinstance(model.conv1, SASAStem2d)
    conv = small(SASAResNet)
    for size in ((32, 40), (30, 37), (5, 9)):
        x = torch.rand(2, 3, *size)
        assert [a.shape for a in model(x)] == [b.shape for b in conv(x)]


@BACKBONES
def test_config_of_resnet_builds_with_only_the_type_changed(cls):
    backbone = dict(
        type=cls.__name__, depth=50, num_stages=4, out_indices=(0, 1, 2, 3),
        frozen_stages=1, norm_cfg=dict(type='BN', requires_grad=True),
        norm_eval=True, style='pytorch')
    with pytest.warns(UserWarning, match='layer1'):
        model = MODELS.build(backbone)
    assert isinstance(model, cls)


@BACKBONES
def test_start_values_survive_init_weights(cls):
    model = small(cls, attn_cfg=dict(num_heads=2))
    model.init_weights()
    for name, m in model.named_modules():
        if isinstance(m, ACmix2d):
            eye = torch.eye(9).view(9, 3, 3)
            assert torch.equal(m.shift_weight[0],
                               eye.expand(m.out_channels, -1, -1, -1)), name
            assert m.alpha.item() == m.beta.item() == 0.5, name
        if isinstance(m, StandAloneSelfAttention2d):
            # a Kaiming pass would leave embeddings alone, a Normal one not
            assert 0.5 < m.rel_pos_h.std() < 1.5, name
            q, k, _ = m.in_proj_weight.split(m.out_channels)
            assert q.std() < k.std(), name
    for block in model.layer3:
        assert (block.norm3.weight == 0).all()  # zero_init_residual


@BACKBONES
@pytest.mark.parametrize('with_frozen', [False, True])
@pytest.mark.filterwarnings('ignore:frozen_stages')
def test_activation_checkpointing_changes_nothing(cls, with_frozen):
    frozen = dict(frozen_stages=1) if with_frozen else {}
    plain = small(cls, norm_eval=False, **frozen)
    saving = small(cls, norm_eval=False, with_cp=True, **frozen)
    saving.load_state_dict(plain.state_dict())
    # norms of few values magnify the rounding of float32
    plain.double(), saving.double()
    x = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    for model in (plain, saving):
        model.train()
        sum(out.square().mean() for out in model(x)).backward()
    for a, b in zip(plain(x), saving(x)):
        assert_close(a, b)
    for (name, p), q in zip(plain.named_parameters(), saving.parameters()):
        assert (p.grad is None) == (q.grad is None) == (
            not p.requires_grad), name
        if p.grad is not None:
            assert_close(q.grad, p.grad, msg=lambda text: f'{name}: {text}')


@BACKBONES
def test_frozen_stages_stay_frozen(cls):
    with pytest.warns(UserWarning, match='layer1.*frozen_stages=-1'):
        model = small(cls, frozen_stages=1, norm_eval=False)
    for _ in range(2):
        frozen = [p for m in (model.conv1, model.norm1, model.layer1)
                  for p in m.parameters()]
        assert not any(p.requires_grad for p in frozen)
        assert all(p.requires_grad for p in model.layer2.parameters())
        assert not any(m.training for m in model.layer1.modules())
        before = copy.deepcopy(model.layer1.state_dict())
        model(torch.rand(2, 3, 32, 32))
        for name, value in model.layer1.state_dict().items():
            assert torch.equal(value, before[name]), name
        model.train()


@BACKBONES
def test_frozen_convolutions_do_not_warn(cls, recwarn):
    small(cls, frozen_stages=1, stage_with_attn=(False, True, True, True))
    assert not [w for w in recwarn if 'frozen_stages' in str(w.message)]


@BACKBONES
def test_convolutional_weights_load_into_unchanged_layers(cls, tmp_path,
                                                          caplog):
    MMLogger.get_current_instance().addHandler(caplog.handler)
    stages = (False, False, True, True)
    torch.manual_seed(1)
    conv = ResNet(50, base_channels=16)
    path = tmp_path / 'resnet.pth'
    torch.save(conv.state_dict(), path)
    model = small(
        cls, 50, stage_with_attn=stages,
        init_cfg=dict(type='Pretrained', checkpoint=str(path)))
    attention = {k: v.clone() for k, v in model.state_dict().items()
                 if k not in conv.state_dict()}
    assert attention and all('.conv2.' in k for k in attention)
    model.init_weights()
    MMLogger.get_current_instance().removeHandler(caplog.handler)
    state = model.state_dict()
    for key, value in conv.state_dict().items():
        if key in state:
            assert torch.equal(state[key], value), key
        else:
            assert key.startswith(('layer3', 'layer4')), key
            assert key.endswith('.conv2.weight'), key
    for key, value in attention.items():
        assert torch.equal(state[key], value), key
    loaded = len(state) - len(attention)
    assert f'{loaded} of {len(state)} tensors loaded' in caplog.text
    assert f'; {len(attention)} (' in caplog.text
    assert '; 9 (' in caplog.text


@pytest.mark.parametrize('prefix', [None, 'backbone'])
def test_prefix_of_a_detector_checkpoint(prefix, tmp_path):
    torch.manual_seed(1)
    state = small(SASAResNet).state_dict()
    for value in state.values():
        value.add_(1)
    path = tmp_path / 'detector.pth'
    start = f'{prefix}.' if prefix else ''
    torch.save(dict(state_dict={
        f'module.{start}{k}': v for k, v in state.items()
    }), path)
    model = small(SASAResNet, init_cfg=dict(
        type='Pretrained', checkpoint=str(path), prefix=prefix))
    model.init_weights()
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize('prefix', [None, 'neck'])
def test_checkpoint_without_a_fitting_weight_is_an_error(prefix, tmp_path):
    path = tmp_path / 'other.pth'
    torch.save({f'encoder.{k}': v for k, v in
                small(SASAResNet).state_dict().items()}, path)
    model = small(SASAResNet, init_cfg=dict(
        type='Pretrained', checkpoint=str(path), prefix=prefix))
    with pytest.raises(ValueError, match='0 of [0-9]+ tensors loaded'):
        model.init_weights()


@BACKBONES
@pytest.mark.parametrize('arguments, error, message', [
    (dict(depth=20), ValueError, r'depth must be one of \[18, 26.*got 20'),
    (dict(depth=[18]), ValueError, r'depth must be one of .*got \[18\]'),
    (dict(num_stages=None), TypeError, 'num_stages must be an int, got None'),
    (dict(frozen_stages='1'), TypeError,
     "frozen_stages must be an int, got '1'"),
    (dict(out_indices=3), TypeError, 'out_indices must be a list .*got 3'),
    (dict(out_indices=(0, 'x')), TypeError,
     "each of out_indices must be an int, got 'x'"),
    (dict(init_cfg='x.pth'), TypeError, "init_cfg must be a dict.*'x.pth'"),
    (dict(init_cfg=['x.pth']), TypeError, "init_cfg must .*list.*'x.pth'"),
    (dict(init_cfg=dict(type='WarmStart')), ValueError,
     "init_cfg must have a checkpoint.*got .*'WarmStart'"),
    (dict(init_cfg=dict(checkpoint=None)), TypeError,
     r"init_cfg\['checkpoint'\] must be a str, got None"),
    (dict(init_cfg=dict(checkpoint='x.pth', prefix=3)), TypeError,
     r"init_cfg\['prefix'\] must be a str, got 3"),
    (dict(attn_cfg=dict(type='')), ValueError, "registered layer.*got ''"),
    (dict(attn_cfg=dict(type=3)), ValueError, 'registered layer.*got 3'),
    (dict(stage_with_attn=(False, ) * 4), ValueError,
     'stage_with_attn must be True for some stage'),
    (dict(stage_with_attn=(True, True)), ValueError,
     r'stage_with_attn .*num_stages=4, got \(True, True\)'),
    (dict(pretrained='x.pth'), ValueError,
     "pretrained must be None, use init_cfg.*got 'x.pth'"),
    (dict(attn_stem={}, deep_stem=True), ValueError,
     'attn_stem must be None with deep_stem=True'),
    (dict(attn_stem=dict(heads=4)), TypeError, 'attn_stem must .*heads'),
    (dict(attn_stem=True), TypeError, 'attn_stem must be a dict.*got True'),
    (dict(stage_with_attn='TFFF'), TypeError,
     "stage_with_attn must be a list or tuple of bool, got 'TFFF'"),
    (dict(stage_with_attn=('False', ) * 4), TypeError, 'of bool, got'),
    (dict(stage_with_attn=True), TypeError, 'of bool, got True'),
    (dict(frozen_stages=5), ValueError,
     'frozen_stages must be at most num_stages=4, got 5'),
    (dict(out_indices=(3, 1)), ValueError,
     r'out_indices must be increasing.*got \(3, 1\)'),
    (dict(out_indices=(0, 4)), ValueError, r'got \(0, 4\)'),
    (dict(num_stages=2), ValueError, 'strides.*fit it.*num_stages.*2'),
    (dict(attn_cfg=dict(type='Conv2d')), ValueError,
     "attn_cfg\\['type'\\] must be an attention layer.*got Conv2d"),
    (dict(attn_cfg=dict(type='ReLU')), ValueError, 'got ReLU'),
    (dict(attn_cfg=dict(type='SASAStem')), ValueError, 'got SASAStem2d'),
    (dict(attn_cfg=dict(kernel_att=7)), TypeError,
     "arguments of .* \\(num_heads, attn_kernel_size.*got 'kernel_att'"),
    (dict(attn_cfg=dict(kernel_size=7)), TypeError, "got 'kernel_size'"),
    (dict(attn_cfg=dict(type='Conv5d')), ValueError,
     "type.*registered layer.*got 'Conv5d'"),
    (dict(attn_cfg='SASA'), TypeError, "attn_cfg must be a dict .*'SASA'"),
    (dict(attn_cfg=dict(num_heads=3)), ValueError,
     'cannot replace conv2 of Bottleneck: .*out_channels=16, num_heads=3'),
    (dict(dcn=dict(type='DCNv2'), stage_with_dcn=(False, False, True, True)),
     ValueError, 'stage_with_dcn and stage_with_attn must not name'),
    (dict(unknown=1), TypeError, 'unknown'),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else '')
def test_bad_arguments_are_named_with_their_value(cls, arguments, error,
                                                  message):
    with pytest.raises(error, match=message):
        small(cls, **arguments)


def test_grouped_convolutions_are_refused_by_name():
    from acmix_det.models.swap import swap_conv
    parent = nn.Module()
    parent.conv2 = nn.Conv2d(16, 16, 3, padding=1, groups=4)
    with pytest.raises(ValueError, match='SASA cannot replace conv2 of '
                       'Module: groups must be 1, got 4'):
        swap_conv(parent, 'conv2', dict(type='SASA'))
    parent.conv2 = nn.Linear(2, 2)
    with pytest.raises(TypeError, match='conv2 of Module.*got Linear'):
        swap_conv(parent, 'conv2', dict(type='SASA'))

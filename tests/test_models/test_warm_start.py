"""Backbones that start from the weights of a convolutional ResNet."""
import pytest
import torch
from mmdet.models.backbones import ResNet
from mmengine.logging import MMLogger
from torch import nn

from acmix_det.layers import AttentionConv2d
from acmix_det.models import ACmixResNet, SASAResNet

BACKBONES = pytest.mark.parametrize('cls', [SASAResNet, ACmixResNet])


@pytest.fixture
def log(caplog):
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def save(tmp_path, state):
    path = tmp_path / 'conv.pth'
    torch.save(state, path)
    return dict(type='WarmStart', checkpoint=str(path))


def trained_resnet(depth):
    """Norms as after a training, not 1 and 0."""
    torch.manual_seed(1)
    model = ResNet(depth, base_channels=16)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
    model.eval()  # returns None
    return model


@BACKBONES
@pytest.mark.parametrize('depth', [18, 26])
def test_every_layer_is_loaded_or_imitates(cls, depth, tmp_path, log):
    if depth == 26:
        conv = cls(26, base_channels=16, stage_with_attn=(False, ) * 4,
                   attn_stem={})
        state = {k: v for k, v in conv.state_dict().items()
                 if not k.startswith('conv1.')}
    else:
        state = trained_resnet(depth).state_dict()
    model = cls(depth, base_channels=16, stage_with_attn=(False, True) * 2,
                init_cfg=save(tmp_path, state))
    model.init_weights()
    layers = {k: m for k, m in model.named_modules()
              if isinstance(m, AttentionConv2d)}
    assert f'{len(layers)} attention layers imitate' in log.text
    assert 'random: 0' in log.text
    for key in layers:
        assert f'  {key}: 0.' in log.text
    for key, value in model.state_dict().items():
        if key in state:
            assert torch.equal(value, state[key]), key
    model.init_weights()  # runners may call it again


def test_acmix_with_enough_maps_computes_what_the_convolution_computes(
        tmp_path):
    # 16 input channels and 9 of 9 taps: only stage 1 is exact
    conv = trained_resnet(18)
    for block in conv.layer1:
        for layer in (block.conv1, block.conv2):
            # kernels that 9 maps can hold
            layer.weight.data[:, 9:] = 0
    model = ACmixResNet(
        18, base_channels=16, stage_with_attn=(True, False, False, False),
        init_cfg=save(tmp_path, conv.state_dict()), norm_eval=True)
    model.init_weights()
    for module in model.modules():
        if isinstance(module, AttentionConv2d):
            module.alpha.data.zero_()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for actual, expected in zip(model.eval()(x), conv(x)):
            torch.testing.assert_close(actual, expected, rtol=1e-3,
                                       atol=1e-3)


@BACKBONES
def test_layers_without_a_convolution_in_the_checkpoint_are_told(
        cls, tmp_path, log):
    state = {k: v for k, v in trained_resnet(50).state_dict().items()
             if k != 'layer4.1.conv2.weight'}
    model = cls(50, base_channels=16, init_cfg=save(tmp_path, state))
    model.init_weights()
    assert 'random: 1 (layer4.1.conv2)' in log.text


@BACKBONES
def test_checkpoint_without_any_convolution_is_an_error(cls, tmp_path):
    source = cls(26, base_channels=16)
    model = cls(26, base_channels=16,
                init_cfg=save(tmp_path, source.state_dict()))
    with pytest.raises(ValueError, match='with convolutions.*to imitate, got'):
        model.init_weights()


def test_query_of_sasa_uses_the_norm_in_front_of_it(tmp_path):
    conv = trained_resnet(50)
    bn = conv.layer4[2].bn1
    nn.init.constant_(bn.bias, 5)
    model = SASAResNet(50, base_channels=16,
                       init_cfg=save(tmp_path, conv.state_dict()))
    model.init_weights()
    layer = model.layer4[2].conv2
    query = layer.in_proj_weight[:layer.out_channels].sum(1) * 5
    assert query.mean().item() == pytest.approx(1, abs=0.1)

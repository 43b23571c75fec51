import pytest
import torch

from acmix_det.checkpoints import convert_acmix
from acmix_det.layers import ACmix2d
from acmix_det.models import ACmixResNet


def released_layer(prefix='', c=8, heads=2):
    shapes = {
        'rate1': (1, ), 'rate2': (1, ), 'conv_p.weight': (c // heads, 2, 1, 1),
        'conv_p.bias': (c // heads, ), 'fc.weight': (9, 3 * heads, 1, 1),
        'dep_conv.weight': (c, 9, 3, 3)
    }
    for i in (1, 2, 3):
        shapes[f'conv{i}.weight'] = (c, c, 1, 1)
        shapes[f'conv{i}.bias'] = (c, )
    return {prefix + k: torch.randn(s) for k, s in shapes.items()}


def released_resnet(model):
    """State dict of our model under the released names."""
    state = {}
    for key, x in model.state_dict().items():
        layer, _, name = key.rpartition('.conv2.')
        if not layer:
            state[key] = x
            continue
        prefix = f'{layer}.conv2.'
        if name in ('in_proj_weight', 'in_proj_bias'):
            kind = name.split('_')[-1]
            for i, part in enumerate(x.chunk(3), 1):
                state[f'{prefix}conv{i}.{kind}'] = (
                    part[..., None, None] if kind == 'weight' else part)
        else:
            released, reshape = {
                'alpha': ('rate1', lambda x: x),
                'beta': ('rate2', lambda x: x),
                'pos_weight': ('conv_p.weight', lambda x: x[..., None, None]),
                'pos_bias': ('conv_p.bias', lambda x: x),
                'fc_weight': ('fc.weight', lambda x: x[..., None, None]),
                'shift_weight': ('dep_conv.weight', lambda x: x[0]),
            }[name]
            state[prefix + released] = reshape(x)
    state['fc.weight'], state['fc.bias'] = torch.rand(1000, 2048), torch.rand(
        1000)
    return state


def test_layer_loads_without_missing_or_unexpected_keys():
    layer = ACmix2d(8, 8, 3, padding=1, bias=False, num_heads=2)
    state = released_layer()
    layer.load_state_dict(convert_acmix(state))
    assert torch.equal(layer.alpha, state['rate1'])
    assert torch.equal(layer.beta, state['rate2'])
    assert torch.equal(layer.in_proj_weight[8:16, :, None, None],
                       state['conv2.weight'])


@pytest.mark.parametrize('wrap', [
    lambda s: s,
    lambda s: dict(state_dict=s, epoch=3),
    lambda s: dict(model=s),
    lambda s: {f'module.{k}': v for k, v in s.items()},
], ids=['plain', 'state_dict', 'model', 'data-parallel'])
def test_resnet_round_trip(wrap):
    torch.manual_seed(0)
    model = ACmixResNet(26, base_channels=8)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    converted = convert_acmix(wrap(released_resnet(model)))
    torch.manual_seed(1)
    other = ACmixResNet(26, base_channels=8)
    other.load_state_dict(converted)
    x = torch.randn(1, 3, 40, 48)
    model.eval(), other.eval()
    for a, b in zip(model(x), other(x)):
        assert torch.equal(a, b)


@pytest.mark.parametrize('change, error, message', [
    (lambda s: s.update(stray=torch.rand(1)), ValueError, 'got stray'),
    (lambda s: s.update({'dep_conv.bias': torch.rand(8)}), ValueError,
     'got dep_conv.bias'),
    (lambda s: s.pop('conv_p.bias'), ValueError, 'got none for conv_p.bias'),
    (lambda s: s.pop('dep_conv.weight'), ValueError,
     'must hold a released ACmix layer .*got rate1'),
    (lambda s: s.update(rate1=0.5), TypeError, 'other values for rate1'),
])
def test_layer_keys_that_do_not_fit_are_named(change, error, message):
    state = released_layer()
    change(state)
    with pytest.raises(error, match=message):
        convert_acmix(state)


def test_stray_key_inside_a_resnet_is_named():
    state = released_layer('layer1.0.conv2.')
    state['layer1.0.conv2.odd'] = torch.rand(1)
    state['head.weight'] = torch.rand(1)
    with pytest.raises(ValueError,
                       match='got layer1.0.conv2.odd, head.weight'):
        convert_acmix(state)


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match='state_dict must be a mapping.*list'):
        convert_acmix([])
    with pytest.raises(ValueError, match='got no keys'):
        convert_acmix({})

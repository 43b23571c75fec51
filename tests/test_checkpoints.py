import pytest
import torch

from acmix_det.checkpoints import convert_acmix
from acmix_det.layers import ACmix2d
from acmix_det.models import ACmixResNet, ACmixSwinTransformer
from tests.test_models.test_swin import released


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


def released_swin(**changes):
    """Released weights with all that a file of a whole classifier has."""
    state = released()[0]
    state.update({
        'head.weight': torch.rand(5, 24), 'head.bias': torch.rand(5),
        'layers.0.blocks.1.attn_mask': torch.rand(4, 49, 49),
        'layers.0.blocks.0.attn.relative_position_index': torch.zeros(49, 49)
    })
    return {**state, **changes}


@pytest.mark.parametrize('wrap', [
    lambda s: s,
    lambda s: dict(model=s, epoch=300),
    lambda s: dict(model={f'module.{k}': v for k, v in s.items()}),
], ids=['plain', 'model', 'data-parallel'])
def test_swin_converts_to_all_but_the_output_norms(wrap):
    state = released_swin()
    converted = convert_acmix(wrap(state))
    model = ACmixSwinTransformer(
        embed_dims=12, depths=(2, 2), num_heads=(2, 3), strides=(4, 2),
        out_indices=(0, 1))
    result = model.load_state_dict(converted, strict=False)
    assert result.missing_keys == [
        f'norm{i}.{kind}' for i in (0, 1) for kind in ('weight', 'bias')]
    assert not result.unexpected_keys
    ours, theirs = 'stages.1.blocks.0.attn.', 'layers.1.blocks.0.attn.'
    own = model.state_dict()
    assert torch.equal(own[f'{ours}alpha'], state[f'{theirs}rate1'])
    assert torch.equal(own[f'{ours}beta'], state[f'{theirs}rate2'])
    assert torch.equal(own[f'{ours}fc_bias'], state[f'{theirs}fc.bias'])
    assert torch.equal(own[f'{ours}w_msa.qkv.weight'],
                       state[f'{theirs}qkv.weight'])


def test_swin_without_biases_of_the_projections_converts():
    state = {k: x for k, x in released_swin().items() if 'qkv.bias' not in k}
    converted = convert_acmix(state)
    assert set(convert_acmix(released_swin())) - set(converted) == {
        f'stages.{i}.blocks.{j}.attn.w_msa.qkv.bias'
        for i in (0, 1) for j in (0, 1)}


@pytest.mark.parametrize('change, message', [
    (lambda s: s.update(absolute_pos_embed=torch.rand(1)),
     'ACmix Swin only, got absolute_pos_embed$'),
    (lambda s: s.update({'layers.0.blocks.0.attn.conv_p.weight':
                         torch.rand(1)}),
     'got layers.0.blocks.0.attn.conv_p.weight$'),
    (lambda s: s.update({'layers.0.blocks.0.attn.dep_conv.bias':
                         torch.rand(1)}),
     'got layers.0.blocks.0.attn.dep_conv.bias$'),
    (lambda s: s.update({'layers.0.odd.weight': torch.rand(1)}),
     'got layers.0.odd.weight$'),
    (lambda s: s.update({'header.weight': torch.rand(1)}),
     'got header.weight$'),
    (lambda s: s.update({'norm1.weight_orig': torch.rand(1)}),
     'got norm1.weight_orig$'),
    (lambda s: s.update({'patch_embed.proj.weight_orig': torch.rand(1)}),
     'got patch_embed.proj.weight_orig$'),
    (lambda s: s.pop('layers.1.blocks.1.attn.dep_conv.weight'),
     'got none for layers.1.blocks.1.attn.dep_conv.weight$'),
    (lambda s: s.pop('layers.0.blocks.1.attn.fc.bias'),
     'got none for layers.0.blocks.1.attn.fc.bias$'),
], ids=['position', 'conv_p', 'bias', 'layer', 'head', 'output-norm', 'suffix',
        'block', 'fc'])
def test_swin_keys_that_do_not_fit_are_named(change, message):
    state = released_swin()
    change(state)
    with pytest.raises(ValueError, match=message):
        convert_acmix(state)


def test_plain_swin_is_refused():
    with pytest.raises(ValueError, match='must hold a released ACmix layer'):
        convert_acmix({k: x for k, x in released_swin().items()
                       if 'dep_conv' not in k})


@pytest.mark.parametrize('key', ['fc.weight', 'conv2.weight', 'conv1.bias'])
def test_layer_weights_of_another_shape_are_named(key):
    state = dict(released_layer(), **{key: torch.ones(())})
    with pytest.raises(ValueError, match=rf'{key} of shape \(\)'):
        convert_acmix(state)


@pytest.mark.parametrize('key', [
    'layers.0.blocks.0.attn.fc.weight', 'layers.0.downsample.norm.weight',
    'layers.0.downsample.reduction.weight'])
@pytest.mark.parametrize('shape', [(), (3, ), (3, 5)], ids=str)
def test_swin_weights_of_another_shape_are_named_or_kept(key, shape):
    state = released_swin(**{key: torch.ones(shape)})
    try:
        convert_acmix(state)
    except ValueError as error:
        assert f'{key} of shape {shape}' in str(error)

"""Conversion of released ACmix checkpoints to the names of this package."""
from typing import Dict, Iterable, Mapping

import torch
from torch import Tensor

# released name -> (our name, how to reshape); conv1, conv2 and conv3 are the
# query, key and value projections and become one weight and one bias
_PROJECTIONS = ('conv1', 'conv2', 'conv3')
_RENAMED = {
    'rate1': ('alpha', lambda x: x),
    'rate2': ('beta', lambda x: x),
    'conv_p.weight': ('pos_weight', lambda x: x.flatten(1)),
    'conv_p.bias': ('pos_bias', lambda x: x),
    'fc.weight': ('fc_weight', lambda x: x.flatten(1)),
    'dep_conv.weight': ('shift_weight', lambda x: x[None]),
}
_LAYER_KEYS = {
    *_RENAMED,
    *(f'{name}.{kind}' for name in _PROJECTIONS for kind in ('weight', 'bias'))
}
_RESNET_PREFIXES = ('conv1.', 'bn1.', 'layer1.', 'layer2.', 'layer3.',
                    'layer4.')
_CLASSIFIER_KEYS = {'fc.weight', 'fc.bias'}


def convert_acmix(state_dict: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """Convert the weights of a released ACmix layer or ACmix ResNet.

    Which of the two it is shows in the keys. A layer converts to the state of
    :class:`acmix_det.layers.ACmix2d` (without a bias on the output, as
    released), a ResNet to that of ``ACmixResNet``: its classifier, ``fc``,
    is left out, and a prefix ``module.`` of all keys is removed.

    Args:
        state_dict (Mapping[str, Tensor]): Weights under the names of the
            released code, which may lie under the key ``state_dict`` or
            ``model`` of a checkpoint.

    Returns:
        dict[str, Tensor]: The same weights under our names.

    Raises:
        TypeError: If ``state_dict`` is not a mapping of names to tensors.
        ValueError: If it holds no ACmix layer, a layer lacks a weight, or a
            key is unknown.
    """
    state_dict = _unwrap(state_dict)
    prefixes = [
        key[:-len('dep_conv.weight')] for key in state_dict
        if key == 'dep_conv.weight' or key.endswith('.dep_conv.weight')
    ]
    if not prefixes:
        raise ValueError(
            'state_dict must hold a released ACmix layer (rate1, rate2, '
            f'conv1.weight, ..., dep_conv.weight), got {_some(state_dict)}')
    converted, used = {}, set()
    for prefix in prefixes:
        converted.update(_convert_layer(state_dict, prefix))
        used.update(prefix + key for key in _LAYER_KEYS)
    is_layer = prefixes == ['']
    unknown = []
    for key, value in state_dict.items():
        if key in used or (not is_layer and key in _CLASSIFIER_KEYS):
            continue
        inside_layer = any(key.startswith(prefix) for prefix in prefixes)
        if inside_layer or not key.startswith(_RESNET_PREFIXES):
            unknown.append(key)
        converted[key] = value
    if unknown:
        raise ValueError('state_dict must hold the weights of a released '
                         f'ACmix layer or ResNet only, got {_some(unknown)}')
    return converted


def _unwrap(state_dict: Mapping) -> Mapping[str, Tensor]:
    if not isinstance(state_dict, Mapping):
        raise TypeError('state_dict must be a mapping of names to tensors, '
                        f'got {type(state_dict).__name__}')
    for key in ('state_dict', 'model'):
        if isinstance(state_dict.get(key), Mapping):
            state_dict = state_dict[key]
    wrong = [
        key for key, value in state_dict.items()
        if not (isinstance(key, str) and isinstance(value, Tensor))
    ]
    if wrong:
        raise TypeError('state_dict must map names to tensors, got other '
                        f'values for {_some(wrong)}')
    if state_dict and all(key.startswith('module.') for key in state_dict):
        return {key[len('module.'):]: x for key, x in state_dict.items()}
    return state_dict


def _convert_layer(state_dict: Mapping[str, Tensor],
                   prefix: str) -> Dict[str, Tensor]:
    missing = [
        prefix + key for key in sorted(_LAYER_KEYS)
        if prefix + key not in state_dict
    ]
    if missing:
        raise ValueError('state_dict must hold every weight of an ACmix '
                         f'layer, got none for {_some(missing)}')
    layer = {
        prefix + ours: reshape(state_dict[prefix + released])
        for released, (ours, reshape) in _RENAMED.items()
    }
    for kind in ('weight', 'bias'):
        layer[f'{prefix}in_proj_{kind}'] = torch.cat([
            state_dict[f'{prefix}{name}.{kind}'].flatten(1) if kind == 'weight'
            else state_dict[f'{prefix}{name}.{kind}'] for name in _PROJECTIONS
        ])
    return layer


def _some(keys: Iterable[str]) -> str:
    keys = list(keys)
    more = f' and {len(keys) - 5} more' if len(keys) > 5 else ''
    return ', '.join(map(str, keys[:5])) + more if keys else 'no keys'

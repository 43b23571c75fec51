"""Conversion of released ACmix checkpoints to the names of this package."""
import re
from typing import Callable, Dict, Iterable, Mapping

import torch
from mmdet.models.backbones.swin import swin_converter
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

# in the attention of a Swin block; the projections keep their names
_RENAMED_SWIN = {
    key: value
    for key, value in _RENAMED.items() if not key.startswith('conv_p')
}
_RENAMED_SWIN['fc.bias'] = ('fc_bias', lambda x: x)
_SWIN_ATTENTION = re.compile(r'layers\.\d+\.blocks\.\d+\.attn\.')
_SWIN_ATTENTION_KEYS = {
    *_RENAMED_SWIN, 'qkv.weight', 'proj.weight', 'proj.bias',
    'relative_position_bias_table'
}
# follows from the window and image size
_SWIN_BUFFER = re.compile(r'.+\.(attn\.relative_position_index|attn_mask)')
_SWIN_KEY = re.compile(
    r'(head|norm|patch_embed\.(proj|norm)'
    r'|layers\.\d+\.(blocks\.\d+\.(norm[12]|mlp\.fc[12]|attn\.qkv)'
    r'|downsample\.(reduction|norm)))\.(weight|bias)')


def convert_acmix(state_dict: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """Convert the weights of a released ACmix layer, ResNet or Swin.

    Which of the three it is shows in the keys. A layer converts to the state
    of :class:`acmix_det.layers.ACmix2d` (without a bias on the output, as
    released), a ResNet to that of ``ACmixResNet``, a Swin Transformer to that
    of ``ACmixSwinTransformer``. The classifier is left out (``fc``; ``head``
    and the final ``norm`` of a Swin), as are Swin's buffers, and a prefix
    ``module.`` of all keys is removed.

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

    Example:
        >>> import torch
        >>> from acmix_det.checkpoints import convert_acmix
        >>> released = torch.load('acmix_swin.pth')  # doctest: +SKIP
        >>> torch.save(convert_acmix(released), 'ours.pth')  # doctest: +SKIP
    """
    state_dict = unwrap_state_dict(state_dict)
    prefixes = [
        key[:-len('dep_conv.weight')] for key in state_dict
        if key == 'dep_conv.weight' or key.endswith('.dep_conv.weight')
    ]
    if not prefixes:
        raise ValueError(
            'state_dict must hold a released ACmix layer (rate1, rate2, '
            f'conv1.weight, ..., dep_conv.weight), got {some_of(state_dict)}')
    if any(_SWIN_ATTENTION.fullmatch(prefix) for prefix in prefixes):
        return _convert_swin(state_dict)
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
                         f'ACmix layer or ResNet only, got {some_of(unknown)}')
    return converted


def rename_swin(state_dict: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """Convert the names of the Swin repository to mmdet's.

    Args:
        state_dict (Mapping[str, Tensor]): Weights of a Swin Transformer.

    Returns:
        dict[str, Tensor]: The same weights, in the order of mmdet's patch
        merging, without the classifier, the final norm and the buffers.
    """
    renamed = {}
    for key, x in state_dict.items():
        if key.startswith('norm.') or _SWIN_BUFFER.fullmatch(key):
            continue
        try:
            renamed.update(swin_converter({key: x}))
        except (IndexError, RuntimeError, ValueError) as error:
            raise _wrong_shape({key: x}) from error
    return {key[len('backbone.'):]: x for key, x in renamed.items()}


def unwrap_state_dict(state_dict: Mapping) -> Mapping[str, Tensor]:
    """Take the weights out of a checkpoint.

    Args:
        state_dict (Mapping): Weights, or a checkpoint that holds them under
            the key ``state_dict`` or ``model``.

    Returns:
        Mapping[str, Tensor]: The weights, without a prefix ``module.`` of all
        keys.

    Raises:
        TypeError: If they are not a mapping of names to tensors.
    """
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
                        f'values for {some_of(wrong)}')
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
                         f'layer, got none for {some_of(missing)}')
    layer = {
        prefix + ours: _reshaped(state_dict, prefix + released, reshape)
        for released, (ours, reshape) in _RENAMED.items()
    }
    for kind in ('weight', 'bias'):
        parts = {
            key: _reshaped(state_dict, key, lambda x: x.flatten(1)
                           if kind == 'weight' else x)
            for key in (f'{prefix}{name}.{kind}' for name in _PROJECTIONS)
        }
        try:
            layer[f'{prefix}in_proj_{kind}'] = torch.cat([*parts.values()])
        except RuntimeError as error:
            raise _wrong_shape(parts) from error
    return layer


def _reshaped(state_dict: Mapping[str, Tensor], key: str,
              reshape: Callable[[Tensor], Tensor]) -> Tensor:
    try:
        return reshape(state_dict[key])
    except IndexError as error:
        raise _wrong_shape({key: state_dict[key]}) from error


def _wrong_shape(weights: Mapping[str, Tensor]) -> ValueError:
    shapes = ', '.join(f'{key} of shape {tuple(x.shape)}'
                       for key, x in weights.items())
    return ValueError('state_dict must hold weights of the released shapes, '
                      f'got {shapes}')


def _convert_swin(state_dict: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    prefixes = {
        match.group(): None
        for match in map(_SWIN_ATTENTION.match, state_dict) if match
    }
    needed = {f'{p}{key}' for p in prefixes for key in _SWIN_ATTENTION_KEYS}
    missing = sorted(needed.difference(state_dict))
    if missing:
        raise ValueError('state_dict must hold every weight of an ACmix '
                         f'layer, got none for {some_of(missing)}')
    unknown = [
        key for key in state_dict
        if not (key in needed or _SWIN_KEY.fullmatch(key)
                or _SWIN_BUFFER.fullmatch(key))
    ]
    if unknown:
        raise ValueError('state_dict must hold the weights of a released '
                         f'ACmix Swin only, got {some_of(unknown)}')
    reshaped = dict(state_dict)
    for prefix in prefixes:
        for name, (_, reshape) in _RENAMED_SWIN.items():
            reshaped[prefix + name] = _reshaped(state_dict, prefix + name,
                                                reshape)
    converted = {}
    for key, x in rename_swin(reshaped).items():
        block, _, name = key.partition('.attn.w_msa.')
        if name in _RENAMED_SWIN:
            key = f'{block}.attn.{_RENAMED_SWIN[name][0]}'
        converted[key] = x
    return converted


def some_of(keys: Iterable[str]) -> str:
    """The first of some names, and how many more there are."""
    keys = list(keys)
    more = f' and {len(keys) - 5} more' if len(keys) > 5 else ''
    return ', '.join(map(str, keys[:5])) + more if keys else 'no keys'

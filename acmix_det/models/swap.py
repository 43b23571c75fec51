"""Replace the convolutions of a built host by attention."""
import inspect
from typing import Optional

from mmcv.cnn import build_conv_layer
from mmengine.registry import MODELS
from torch import nn


def resolve_attn_cfg(attn_cfg: Optional[dict], default_type: str) -> dict:
    """Complete and check the config of an attention layer.

    Args:
        attn_cfg (dict | None): ``type`` (a key of mmengine's root ``MODELS``
            or a class) and the layer's own arguments; those of the replaced
            convolution come from the convolution.
        default_type (str): The type where ``attn_cfg`` has none.

    Returns:
        dict: A copy with its type.

    Raises:
        TypeError: If ``attn_cfg`` is not a dict or has a key that the layer
            does not take.
        ValueError: If its type is not registered.
    """
    attn_cfg = {} if attn_cfg is None else attn_cfg
    if not isinstance(attn_cfg, dict):
        raise TypeError(f'attn_cfg must be a dict or None, got {attn_cfg!r}')
    attn_cfg = {'type': default_type, **attn_cfg}
    layer = attn_cfg['type']
    # the registry fails on names without a first part
    if isinstance(layer, str) and layer[:1] not in ('', '.'):
        with MODELS.switch_scope_and_registry(None) as registry:
            layer = registry.get(attn_cfg['type'])
    if not inspect.isclass(layer):
        raise ValueError("attn_cfg['type'] must be a registered layer such as "
                         f"'SASA' or 'ACmix', got {attn_cfg['type']!r}")
    # a plain convolution would replace nothing; a class may be a host's own
    if issubclass(layer, nn.Conv2d) or not (inspect.isclass(attn_cfg['type'])
                                            or _takes_conv_arguments(layer)):
        raise ValueError(
            "attn_cfg['type'] must be an attention layer that takes the "
            f'arguments of nn.Conv2d, got {layer.__name__}')
    parameters = inspect.signature(layer).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return attn_cfg
    accepted = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for key in attn_cfg:
        if key != 'type' and key not in accepted:
            raise TypeError(
                f'attn_cfg must hold only arguments of {layer.__name__} '
                f'({", ".join(accepted)}), got {key!r}')
    return attn_cfg


def _takes_conv_arguments(layer: type) -> bool:
    parameters = inspect.signature(layer).parameters
    return {'kernel_size', 'stride', 'padding'} <= parameters.keys() or any(
        p.kind is p.VAR_KEYWORD for p in parameters.values())


def swap_conv(parent: nn.Module, name: str, attn_cfg: dict) -> None:
    """Replace the convolution ``parent.name`` by attention of its shape.

    Args:
        parent (nn.Module): The module that holds the convolution.
        name (str): Its attribute.
        attn_cfg (dict): The attention layer, see :func:`resolve_attn_cfg`.

    Raises:
        TypeError: If ``parent.name`` is not an ``nn.Conv2d``.
        ValueError: If the layer cannot stand in for it.
    """
    conv = getattr(parent, name)
    if not isinstance(conv, nn.Conv2d):
        raise TypeError(f'{name} of {type(parent).__name__} must be an '
                        f'nn.Conv2d to be replaced, got {type(conv).__name__}')
    try:
        attention = build_conv_layer(
            attn_cfg,
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            stride=conv.stride,
            padding=conv.padding,
            dilation=conv.dilation,
            groups=conv.groups,
            bias=conv.bias is not None)
    except ValueError as error:
        raise ValueError(f'{attn_cfg["type"]} cannot replace {name} of '
                         f'{type(parent).__name__}: {error}') from error
    setattr(parent, name, attention)

"""Weights of a checkpoint for a backbone, with a summary of what was used."""
from typing import Callable, Dict, Iterable, Optional, Sequence

from mmengine.runner import CheckpointLoader
from torch import Tensor, nn

from acmix_det.checkpoints import some_of, unwrap_state_dict


def check_init_cfg(init_cfg: object) -> None:
    """Raise unless it can be the ``init_cfg`` of a backbone.

    Args:
        init_cfg (object): What a config holds.

    Raises:
        TypeError: If it, its checkpoint or its prefix has the wrong type.
        ValueError: If it has no type, or no checkpoint where it needs one.
    """
    cfgs = init_cfg if isinstance(init_cfg, list) else [init_cfg]
    if init_cfg is not None and not all(isinstance(x, dict) for x in cfgs):
        raise TypeError('init_cfg must be a dict, a list of dicts or None, '
                        f'got {init_cfg!r}')
    if not isinstance(init_cfg, dict):
        return
    kind = init_cfg.get('type', 'Pretrained')
    if kind in ('Pretrained', 'WarmStart') and 'checkpoint' not in init_cfg:
        raise ValueError(
            "init_cfg must have a checkpoint where its type is 'Pretrained' "
            f"(also without a type) or 'WarmStart', got {init_cfg!r}")
    for key in ('checkpoint', 'prefix'):
        value = init_cfg.get(key)
        if key in init_cfg and not (isinstance(value, str) or
                                    key == 'prefix' and value is None):
            raise TypeError(f"init_cfg['{key}'] must be a str, got {value!r}")


def read_weights(cfg: dict) -> Dict[str, Tensor]:
    """Read the weights that an ``init_cfg`` names.

    Args:
        cfg (dict): Of type 'Pretrained' (also where there is no type) or
            'WarmStart', with a checkpoint and perhaps a prefix of the keys.

    Returns:
        dict[str, Tensor]: The weights under the prefix, without it.

    Raises:
        ValueError: If ``cfg`` is something else.
    """
    kind = cfg.get('type', 'Pretrained') if isinstance(cfg, dict) else None
    if kind not in ('Pretrained', 'WarmStart') or 'checkpoint' not in cfg:
        raise ValueError(
            "init_cfg must be None or of type 'Pretrained' or 'WarmStart' "
            f'with a checkpoint, got {cfg!r}')
    state = unwrap_state_dict(
        CheckpointLoader.load_checkpoint(
            cfg['checkpoint'], map_location='cpu', logger='silent'))
    prefix = cfg.get('prefix')
    if not prefix:
        return dict(state)
    start = prefix.rstrip('.') + '.'
    return {
        key[len(start):]: x
        for key, x in state.items() if key.startswith(start)
    }


def load_fitting(model: nn.Module,
                 state: Dict[str, Tensor],
                 path: str,
                 adapt: Optional[Callable[[str, Tensor, Tensor],
                                          Tensor]] = None) -> str:
    """Load the weights whose names and shapes fit.

    Args:
        model (nn.Module): The backbone.
        state (dict[str, Tensor]): Weights.
        path (str): Where they are from, for the summary.
        adapt (Callable | None): Called with the name of a weight, the weight,
            and the model's own; returns the weight to load. Defaults to None.

    Returns:
        str: How many tensors were loaded, start new, and were not used.

    Raises:
        ValueError: If none fits.
    """
    own = model.state_dict()
    fits = {}
    for key, x in state.items():
        if key in own:
            x = x if adapt is None else adapt(key, x, own[key])
            if x.shape == own[key].shape:
                fits[key] = x
    new = [key for key in own if key not in fits]
    dropped = [key for key in state if key not in fits]
    summary = (f'{type(model).__name__}: {len(fits)} of {len(own)} tensors '
               f'loaded from {path}')
    if not fits:
        raise ValueError(
            f'{summary}; the checkpoint has {some_of(dropped)}, the model '
            f'{some_of(new)}: check init_cfg (prefix)')
    model.load_state_dict(fits, strict=False)
    return (f'{summary}; {count(new)} start new; {count(dropped)} of the '
            'checkpoint not used')


def count(names: Sequence[str]) -> str:
    """How many names, and the first of them."""
    return f'{len(names)} ({some_of(names)})' if names else '0'


def start_as_plain_attention(cfg: dict, state: Dict[str, Tensor],
                             layers: Iterable[nn.Module]) -> str:
    """Let ACmix layers start as the attention whose weights they have.

    Args:
        cfg (dict): The ``init_cfg``; only 'WarmStart' changes anything.
        state (dict[str, Tensor]): The weights that were loaded.
        layers (Iterable[nn.Module]): ACmix layers. Their alpha becomes 1 and
            their beta 0.

    Returns:
        str: An addition to the summary.

    Raises:
        ValueError: If the weights are those of ACmix layers, or there are no
            layers to start.
    """
    if cfg.get('type') != 'WarmStart':
        return ''
    layers = list(layers)
    if not layers or any(key.endswith('.alpha') for key in state):
        raise ValueError(
            "init_cfg must be of type 'Pretrained' where the checkpoint holds "
            f'all layers of the model, got {cfg!r}')
    for layer in layers:
        nn.init.ones_(layer.alpha)
        nn.init.zeros_(layer.beta)
    return '; alpha is 1 and beta 0, to start as plain attention'

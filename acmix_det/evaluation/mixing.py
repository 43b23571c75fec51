"""How ACmix layers mix attention and convolution."""
import math
from typing import List, NamedTuple, Sequence

from torch import nn


class Mix(NamedTuple):
    """Mixing factors of one ACmix layer."""
    name: str
    alpha: float
    beta: float

    @property
    def log_ratio(self) -> float:
        """log(abs(alpha) / abs(beta)); positive where attention leads."""
        logs = [
            math.log(abs(x)) if x else -math.inf
            for x in (self.alpha, self.beta)
        ]
        return logs[0] - logs[1]


def mixing(model: nn.Module) -> List[Mix]:
    """Factors of attention (alpha) and convolution (beta), by depth.

    Every ACmix layer counts, those of other networks than ResNet as well.

    Raises:
        ValueError: If the model has no ACmix layer.
    """
    mixes = [
        Mix(name, layer.alpha.item(), layer.beta.item())
        for name, layer in model.named_modules()
        if type(layer).__name__.startswith('ACmix')
        and isinstance(getattr(layer, 'alpha', None), nn.Parameter)
    ]
    if not mixes:
        raise ValueError('model must have an ACmix layer, got '
                         f'{type(model).__name__} without one')
    return mixes


def mixing_table(mixes: Sequence[Mix]) -> str:
    """Plain table of the factors."""
    width = max(len(mix.name) for mix in mixes)
    lines = [f'{"layer":{width}}    alpha     beta  log |alpha|/|beta|']
    lines += [
        f'{m.name:{width}} {m.alpha:8.4f} {m.beta:8.4f}  {m.log_ratio:18.4f}'
        for m in mixes
    ]
    return '\n'.join(lines)

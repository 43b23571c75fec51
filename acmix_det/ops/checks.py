"""Argument checks of the operation and of the layers above it."""
import operator
from typing import Sequence


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f'{name} must be one of '
                         f'{", ".join(map(repr, choices))}, got {value!r}')


def check_positive_int(name: str, value: int) -> int:
    """Return ``value`` as an int; raise unless it is a positive one."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f'{name} must be an int, got {value!r}') from None
    if number < 1:
        raise ValueError(f'{name} must be positive, got {value}')
    return number


# larger ones serve no image and overflow the index arithmetic of kernels
MAX_STEP = 2**16


def check_step(name: str, value: int) -> int:
    """Return ``value`` as an int; raise unless it is from 1 to MAX_STEP."""
    number = check_positive_int(name, value)
    if number > MAX_STEP:
        raise ValueError(f'{name} must be at most {MAX_STEP}, got {value}')
    return number


def check_attn_kernel_size(value: int) -> int:
    """Return ``value`` as an int; raise unless it is positive and odd."""
    number = check_step('attn_kernel_size', value)
    if number % 2 == 0:
        raise ValueError(
            'attn_kernel_size must be odd, so that a neighborhood has a '
            f'center, got {value}')
    return number

"""Argument checks of the operation and of the layers above it."""
import math
import operator
from numbers import Real
from typing import Sequence


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f'{name} must be one of '
                         f'{", ".join(map(repr, choices))}, got {value!r}')


def check_int(name: str, value: int) -> int:
    """Return ``value`` as an int; raise TypeError unless it is one."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f'{name} must be an int, got {value!r}') from None


def check_positive_int(name: str, value: int) -> int:
    """Return ``value`` as an int; raise unless it is a positive one."""
    number = check_int(name, value)
    if number < 1:
        raise ValueError(f'{name} must be positive, got {value}')
    return number


# larger ones serve no image and overflow the index arithmetic of kernels
MAX_SIZE = 2**16


def check_size(name: str, value: int, most: int = MAX_SIZE) -> int:
    """Return ``value`` as an int; raise unless it is from 1 to ``most``."""
    number = check_positive_int(name, value)
    if number > most:
        raise ValueError(f'{name} must be at most {most}, got {value}')
    return number


def check_list(name: str, value: Sequence) -> tuple:
    """Return ``value`` as a tuple; raise TypeError unless it is a list."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f'{name} must be a list or tuple, got {value!r}')
    return tuple(value)


def check_stages(name: str, value: Sequence[int], count: int) -> tuple:
    """Return ``value`` as a tuple; raise unless it holds stages."""
    stages = check_list(name, value)
    for stage in stages:
        if not 0 <= check_int(f'each of {name}', stage) < count:
            raise ValueError(f'{name} must be stages from 0 to {count - 1}, '
                             f'got {value}')
    return stages


def check_attn_kernel_size(value: int, name: str = 'attn_kernel_size') -> int:
    """Return ``value`` as an int; raise unless it is positive and odd."""
    number = check_size(name, value)
    if number % 2 == 0:
        raise ValueError(
            f'{name} must be odd, so that a neighborhood has a '
            f'center, got {value}')
    return number


def check_conv_kernel_size(value: int) -> int:
    """Return ``value`` as an int; raise unless it is odd and small."""
    # a shift kernel for each of its taps: the fourth power of the size
    number = check_size('conv_kernel_size', value, most=31)
    if number % 2 == 0:
        raise ValueError(f'conv_kernel_size must be odd, got {value}')
    return number


def check_finite(name: str, value: float) -> float:
    """Return ``value`` as a float; raise unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f'{name} must be a number, got {value!r}')
    try:
        number = float(value)
    except OverflowError:  # of an int
        number = math.inf
    if not abs(number) < math.inf:
        raise ValueError(f'{name} must be a finite number, got {value}')
    return number

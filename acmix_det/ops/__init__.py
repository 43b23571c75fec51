from .cpu_backend import warn_if_not_built
from .local_attention import local_attention

warn_if_not_built()

__all__ = ['local_attention']

from .cpu_backend import warn_if_not_built
from .local_attention import flop_convention, local_attention

warn_if_not_built()

__all__ = ['flop_convention', 'local_attention']

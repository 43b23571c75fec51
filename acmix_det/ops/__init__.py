from .local_attention import local_attention

__all__ = ['local_attention']

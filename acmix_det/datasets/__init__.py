from .digits import DigitsDataset, make_digits

__all__ = ['DigitsDataset', 'make_digits']

from .data_config import check_classes
from .digits import DigitsDataset, make_digits

__all__ = ['DigitsDataset', 'check_classes', 'make_digits']
